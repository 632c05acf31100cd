"""What the log looks like: text for people, or one JSON object per line for machines. All of it goes to stderr."""

import logging
import os
import sys
import threading
from typing import TextIO

from chairlift.service.log_format import JSON, TEXT, formatter, log_uncaught_exceptions

_CLEAR = "\x1b[K"  # from the cursor to the end of the line

_log = logging.getLogger("engine")


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Lines on a terminal, and below them one that is written over and over."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._shown = ""

    def show(self, text: str) -> None:
        """Shows a line below the log, in place of the one before; "" takes it away.

        The cursor stays in front of it: what another process writes to this terminal goes over it, not behind it.
        """
        with self.lock or threading.RLock():
            width = os.get_terminal_size(self.stream.fileno()).columns or 80
            if text or self._shown:
                self._write(f"{_CLEAR}{text[: width - 1]}\r")
            self._shown = text[: width - 1]

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line above it."""
        if self._shown:
            self._write(_CLEAR)
        super().emit(record)
        if self._shown:
            self._write(f"{self._shown}\r")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def log_to_stderr(level_name: str, log_format: str, *, libraries: str = "warning", rank: int | None = None) -> None:
    """Sets up the log of this process.

    Args:
        level_name: of our own lines.
        log_format: TEXT or JSON.
        libraries: level of everybody else's at most: numba's debug lines are thousands.
        rank: of this process, where there are several.
    """
    levels = logging.getLevelNamesMapping()
    level = levels[level_name.upper()]
    is_watched = log_format == TEXT and rank is None and sys.stderr.isatty()
    handler = TerminalHandler(sys.stderr) if is_watched else logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        formatter(
            log_format,
            "chairlift-engine",
            label="" if rank is None else f"rank {rank}",
            fields={} if rank is None else {"rank": rank},
        )
    )
    logging.basicConfig(level=max(level, levels[libraries.upper()]), handlers=[handler])
    for package in ("engine", "kernels"):
        logging.getLogger(package).setLevel(level)
    if log_format == JSON:
        log_uncaught_exceptions(_log)


def terminal() -> TerminalHandler | None:
    """The log's own handler, where a terminal shows it."""
    return next((handler for handler in logging.root.handlers if isinstance(handler, TerminalHandler)), None)
