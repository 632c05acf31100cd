"""Log setup of both servers: text for people, or one JSON object per line for machines, on stderr.

No peer can forge a record: control characters of its names and texts are escaped.
"""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any, TextIO

TEXT, JSON = LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

PACKAGES = ("chairlift", "engine", "frontend", "kernels")
_CLEAR_LINE = "\x1b[K"  # from the cursor to the end of the line

_log = logging.getLogger("chairlift")


def log_to_stderr(program: str, level_name: str, log_format: str, **process: int) -> None:
    """Sets up the log of this process.

    Libraries log warnings and errors only: numba alone has thousands of debug lines.

    Args:
        program: name of the program, a field of every JSON line.
        level_name: level of Chairlift's own lines, one of LOG_LEVELS.
        log_format: TEXT or JSON.
        process: kind and index of this process if there are several, such as `rank=1`.
    """
    levels = logging.getLevelNamesMapping()
    level = levels[level_name.upper()]
    shows_status = log_format == TEXT and not process and sys.stderr.isatty()
    handler = TerminalHandler(sys.stderr) if shows_status else logging.StreamHandler(sys.stderr)
    if log_format == TEXT:
        label = "".join(f"{kind} {index} " for kind, index in process.items())
        line = f"%(asctime)s.%(msecs)03d %(levelname)s {label}%(name)s: %(message)s"
        handler.setFormatter(_TextFormatter(line, "%Y-%m-%d %H:%M:%S"))
    else:
        handler.setFormatter(_json_formatter({"program": program, **process}))
        _log_uncaught_exceptions()
    logging.basicConfig(level=max(level, levels["WARNING"]), handlers=[handler])
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)


def announce(text: str, log_format: str) -> None:
    """Prints a line that starters of this process wait for on stdout, or logs it if the format is JSON.

    A server does not end because the reader of its stdout has (a terminal's Ctrl-C ends `| tee` first), or because the
    disk under it is full.
    """
    if log_format == JSON:
        _log.info("%s", text)
        return
    try:
        print(text, flush=True)  # noqa: T201
    except OSError:
        discard_stdout()


def discard_stdout() -> None:
    """Discards what this process prints from now on, and what is still buffered, because nothing can be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def report_error(program: str, error: object, log_format: str) -> None:
    """Writes the error that ends this process to stderr, in one line."""
    if log_format == JSON:
        _log.critical("%s", error)
    else:
        print(f"{program}: error: {escaped(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


def escaped(text: str) -> str:
    """Returns the text with control characters as Python escapes: line ends, terminal escapes, bidirectional marks.

    Clients choose request ids and model names, and a terminal that shows the log obeys the escapes in them.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def ignore_faults_of_clients() -> None:
    """Drops gRPC's tracebacks of answers to clients that have left, and of metadata that is not UTF-8."""
    from grpc.aio import InternalError

    def is_other(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], InternalError | UnicodeDecodeError))

    logging.getLogger("grpc._cython.cygrpc").addFilter(is_other)


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes records to a terminal, above one status line that is overwritten."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._status = ""

    def show(self, text: str) -> None:
        """Replaces the status line; "" removes it.

        The cursor stays at its start, so that output of another process overwrites it.
        """
        with self.lock or threading.RLock():
            width = os.get_terminal_size(self.stream.fileno()).columns or 80
            if text or self._status:
                self._write(f"{_CLEAR_LINE}{text[: width - 1]}\r")
            self._status = text[: width - 1]

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record above the status line."""
        if self._status:
            self._write(_CLEAR_LINE)
        super().emit(record)
        if self._status:
            self._write(f"{self._status}\r")

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def terminal() -> TerminalHandler | None:
    """Returns the handler that shows a status line; None if the log does not go to a terminal."""
    return next((handler for handler in logging.root.handlers if isinstance(handler, TerminalHandler)), None)


class _TextFormatter(logging.Formatter):
    """Formats a record as one line without control characters; lines of its traceback are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))


def _json_formatter(fields: dict[str, Any]) -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname} {name} {message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "message": "msg"},
        static_fields=fields,
        timestamp="ts",
    )


def _log_uncaught_exceptions() -> None:
    """Logs warnings and uncaught exceptions of all threads as records: the interpreter's own lines are not JSON."""

    def log_exception(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
        _log.critical("ended by a defect", exc_info=(kind, error, traceback) if error is not None else None)

    logging.captureWarnings(True)
    sys.excepthook = log_exception
    threading.excepthook = lambda failure: log_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
