"""Why there is no engine at an address, and what the log says of it: each cause once, not once per attempt."""

import logging
import time

import grpc

from frontend.errors import ConfigError, TokenizerMismatch
from frontend.routing.session import ProtocolViolation

_PROGRESS_LOG_S = 5.0  # between two lines about an engine that loads
_SAID_LATELY = "loading"


class EngineLostError(Exception):
    """The stream has ended or must be given up; says why."""


class EngineNotReadyError(Exception):
    """An engine answers that takes no frontends now, as while it loads; says what it is doing."""


class ConnectionLog:
    """What has been said of one address.

    Args:
        logger: where.
        address: of the engine.
        was_found: nobody has named this address: that nobody is there need not be said.
    """

    def __init__(self, logger: logging.Logger, address: str, *, was_found: bool) -> None:
        self._logger = logger
        self._address = address
        self._was_found = was_found
        self._noted_causes: set[str] = set()  # since the last engine
        self._progress_logged_at_s = float("-inf")

    def clear(self) -> None:
        """An engine is attached."""
        self._noted_causes.clear()

    def note(self, error: Exception, *, was_attached: bool) -> None:
        """There is none: says why, unless it has."""
        level, is_defect = logging.WARNING, False
        reason = cause = str(error) or type(error).__name__
        match error:
            case grpc.aio.AioRpcError():
                reason = f"{error.code().name}: {error.details()}"
                cause = f"{error.code().name} {was_attached}"  # the details are worded differently by every attempt
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    level = logging.ERROR  # waiting will not help, unless somebody does something
                elif not was_attached:
                    level = logging.DEBUG if self._was_found else logging.INFO
            case EngineNotReadyError():
                level, now_s = logging.INFO, time.monotonic()
                if now_s < self._progress_logged_at_s + _PROGRESS_LOG_S:
                    cause = _SAID_LATELY
                elif cause not in self._noted_causes:
                    self._progress_logged_at_s = now_s
                reason = f"not ready, {reason}"
            case TokenizerMismatch() | ConfigError():  # nothing changes unless somebody does something
                level = logging.ERROR
            case EngineLostError() | ProtocolViolation():
                pass
            case _:
                level, is_defect = logging.ERROR, True
        if cause in self._noted_causes or cause == _SAID_LATELY:
            level = logging.DEBUG
        self._noted_causes.add(cause)
        what = "lost the engine at" if was_attached else "no engine at"
        self._logger.log(level, "%s %s: %s", what, self._address, reason, exc_info=error if is_defect else None)
