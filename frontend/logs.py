"""What the log looks like: text for people, or one JSON object per line for machines. All of it goes to stderr."""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any

TEXT, JSON = LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

_log = logging.getLogger("frontend")


def silence_grpc_core() -> None:
    """Stops gRPC's C core from printing, unless GRPC_VERBOSITY is set: it prints what peers send, as it came, and in
    lines that no log format has. To be called before grpc is imported, which reads the variable then.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def log_to_stderr(level_name: str, log_format: str, *, worker: int | None = None) -> None:
    """Sets up the log of this process, in the same form as the engine's.

    Args:
        level_name: one of LOG_LEVELS.
        log_format: one of LOG_FORMATS.
        worker: index of this process, where there are several.
    """
    silence_grpc_core()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(log_format, worker))
    logging.basicConfig(level=level_name.upper(), handlers=[handler])
    if log_format == JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = lambda failure: _log_exception(
            failure.exc_type, failure.exc_value, failure.exc_traceback
        )


def announce(text: str, log_format: str) -> None:
    """Says on stdout what whoever started this waits for; as JSON it is a line of the log: both may end in one file."""
    if log_format == JSON:
        _log.info("%s", text)
    else:
        print(text, flush=True)  # noqa: T201


def complain(program: str, error: object, log_format: str) -> None:
    """Says on stderr, in one line, what ends the process."""
    if log_format == JSON:
        _log.critical("%s", error)
    else:
        print(f"{program}: error: {escaped(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


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


def _formatter(log_format: str, worker: int | None) -> logging.Formatter:
    if log_format == TEXT:
        who = "" if worker is None else f"[{worker}] "
        return _TextFormatter(f"%(asctime)s.%(msecs)03d %(levelname)s {who}%(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    from pythonjsonlogger.json import JsonFormatter

    fields: dict[str, Any] = {"program": "chairlift-frontend"} | ({} if worker is None else {"worker": worker})
    return JsonFormatter(
        "{levelname} {name} {message}",
        style="{",
        rename_fields={"levelname": "level", "name": "logger", "message": "msg"},
        static_fields=fields,
        timestamp="ts",
    )


def _log_exception(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    """In place of the interpreter's own many lines."""
    _log.critical("ended by a defect", exc_info=(kind, error, traceback) if error is not None else None)
