"""Logs why no engine is attached at an address: each cause once, not once per attempt."""

import logging
import time

import grpc

from frontend.errors import ConfigError, TokenizerMismatch
from frontend.routing.wire import ProtocolViolation

MAX_CAUSES = 64
"""Causes remembered at one address. More means that a peer puts other numbers into its message at every attempt."""

_PROGRESS_LOG_S = 5.0  # between two lines about the progress of a loading engine


class EngineLostError(Exception):
    """The stream ended or must be ended; the message says why."""


class EngineNotReadyError(Exception):
    """An engine answers but accepts no frontends yet, for example while it loads; the message is its progress."""


class ConnectionLog:
    """The log of one address.

    Invariant: at most MAX_CAUSES causes are remembered; then all are forgotten, and may be logged again.

    Args:
        logger: gets the lines.
        address: the engine's address.
        was_found: whether the address comes from DNS; a missing engine is then logged at DEBUG.
    """

    def __init__(self, logger: logging.Logger, address: str, *, was_found: bool) -> None:
        self._logger = logger
        self._address = address
        self._was_found = was_found
        self._logged_causes: set[str] = set()  # since an engine was attached
        self._progress_logged_at_s = float("-inf")

    def clear(self) -> None:
        """Forgets the causes, because an engine is attached."""
        self._logged_causes.clear()

    def note(self, error: Exception, *, was_attached: bool) -> None:
        """Logs why no engine is attached, at DEBUG if the cause is logged already."""
        level, is_defect, is_repeated = logging.WARNING, False, False
        reason = cause = str(error) or type(error).__name__
        match error:
            case grpc.aio.AioRpcError():
                reason = f"{error.code().name}: {error.details()}"
                cause = f"{error.code().name} {was_attached}"  # without the details, which differ between attempts
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    level = logging.ERROR  # an operator must act
                elif not was_attached:
                    level = logging.DEBUG if self._was_found else logging.INFO
            case EngineNotReadyError():
                level, now_s = logging.INFO, time.monotonic()
                if now_s < self._progress_logged_at_s + _PROGRESS_LOG_S:
                    is_repeated = True
                elif cause not in self._logged_causes:
                    self._progress_logged_at_s = now_s
                reason = f"not ready, {reason}"
            case TokenizerMismatch() | ConfigError():  # an operator must act
                level = logging.ERROR
            case EngineLostError() | ProtocolViolation():
                pass
            case _:
                level, is_defect = logging.ERROR, True
        if is_repeated or cause in self._logged_causes:
            level = logging.DEBUG
        if not is_repeated:
            if len(self._logged_causes) >= MAX_CAUSES:
                self._logged_causes.clear()
            self._logged_causes.add(cause)
        what = "lost the engine at" if was_attached else "no engine at"
        self._logger.log(level, "%s %s: %s", what, self._address, reason, exc_info=error if is_defect else None)

    def check_integrity(self) -> None:
        """Asserts the invariant; used by tests."""
        assert len(self._logged_causes) <= MAX_CAUSES
