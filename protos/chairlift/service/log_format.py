"""Log formats of both programs: text for people, or one JSON object per line for machines."""

import logging
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

TEXT, JSON = LOG_FORMATS = ("text", "json")


def formatter(
    log_format: str, program: str, *, label: str = "", fields: Mapping[str, Any] | None = None
) -> logging.Formatter:
    """A formatter of log records.

    Args:
        log_format: TEXT or JSON.
        program: name of the program, a field of every JSON line.
        label: text before the logger's name in every text line.
        fields: further fields of every JSON line.
    """
    if log_format == TEXT:
        prefix = f"{label} " if label else ""
        return _TextFormatter(
            f"%(asctime)s.%(msecs)03d %(levelname)s {prefix}%(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
        )
    from pythonjsonlogger.json import JsonFormatter

    return JsonFormatter(
        "{levelname} {name} {message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "message": "msg"},
        static_fields={"program": program, **(fields or {})},
        timestamp="ts",
    )


def log_uncaught_exceptions(log: logging.Logger) -> None:
    """Logs warnings and uncaught exceptions of all threads as records: the interpreter's own lines are no JSON."""

    def log_exception(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
        log.critical("ended by a defect", exc_info=(kind, error, traceback) if error is not None else None)

    logging.captureWarnings(True)
    sys.excepthook = log_exception
    threading.excepthook = lambda failure: log_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)


def escaped(text: str) -> str:
    """Returns the text with control characters as Python escapes: line ends, terminal escapes, bidirectional marks.

    Clients choose request ids and model names, and a terminal that shows the log obeys the escapes in them.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _TextFormatter(logging.Formatter):
    """Formats a record as one line without control characters; lines of its traceback are indented.

    So no text of a client can forge a record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escaped(line)}" for line in text.split("\n"))
