"""What the log looks like: text for people, or one JSON object per line for machines. All of it goes to stderr."""

import logging
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

TEXT, JSON = "text", "json"

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
    handler.setFormatter(_formatter(log_format, rank))
    logging.basicConfig(level=max(level, levels[libraries.upper()]), handlers=[handler])
    for package in ("engine", "kernels"):
        logging.getLogger(package).setLevel(level)
    if log_format == JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = lambda failure: _log_exception(
            failure.exc_type, failure.exc_value, failure.exc_traceback
        )


def terminal() -> TerminalHandler | None:
    """The log's own handler, where a terminal shows it."""
    return next((handler for handler in logging.root.handlers if isinstance(handler, TerminalHandler)), None)


def escaped(text: str) -> str:
    """A text without control characters: line ends, terminal escapes, marks that reverse a line, as Python writes them.

    A client chooses its request id and model name, and a terminal that shows the log obeys what is in them.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _TextFormatter(logging.Formatter):
    """Lines for people, which nothing that a client sends can forge.

    A record is one line without control characters; each line of its traceback is indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


def _formatter(log_format: str, rank: int | None) -> logging.Formatter:
    if log_format == TEXT:
        who = "" if rank is None else f"rank {rank} "
        return _TextFormatter(f"%(asctime)s.%(msecs)03d %(levelname)s {who}%(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    from pythonjsonlogger.json import JsonFormatter

    fields: Mapping[str, Any] = {"program": "chairlift-engine"} | ({} if rank is None else {"rank": rank})
    return JsonFormatter(
        "{levelname} {name} {message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "message": "msg"},
        static_fields=dict(fields),
        timestamp="ts",
    )


def _log_exception(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    """In place of the interpreter's own many lines."""
    _log.critical("ended by a defect", exc_info=(kind, error, traceback) if error is not None else None)
