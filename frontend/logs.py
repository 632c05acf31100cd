"""What the log looks like: text for people, or one JSON object per line for machines. All of it goes to stderr."""

import logging
import os
import sys

from chairlift.service.log_format import JSON, escaped, formatter, log_uncaught_exceptions

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
    handler.setFormatter(
        formatter(
            log_format,
            "chairlift-frontend",
            label="" if worker is None else f"[{worker}]",
            fields={} if worker is None else {"worker": worker},
        )
    )
    logging.basicConfig(level=level_name.upper(), handlers=[handler])
    if log_format == JSON:
        log_uncaught_exceptions(_log)


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
