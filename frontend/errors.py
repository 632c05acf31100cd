"""Errors of the frontend.

    FrontendError
    |-- ConfigError            a flag or the machine prevents the start; says what to change; exit status 2
    |-- TokenizerMismatch      the tokenizer at hand differs from the engine's; health stays NOT_SERVING
    `-- RequestError           ends one call; `api/grpc/status.py` and `api/http/errors.py` map classes to statuses
        |-- InvalidRequest     a field has a value that cannot be served; names the field
        |   `-- RequestTooLong prompt and answer do not fit the model's context
        |-- Unauthenticated    no valid API key
        |-- ModelNotFound      the model is not served here
        |-- QueueFull          the admission queue is full; try again later
        |-- TargetsInfeasible  the latency targets cannot be met now; a slot may be booked for a retry
        |-- DeadlineExceeded   the call's deadline passed
        |-- EngineUnavailable  no engine is available; try again later
        |-- WorkerUnavailable  a worker process cannot be started now; try again later
        |-- ServerDraining     this frontend is shutting down
        |-- ClientStalled      the client stopped reading its answer
        `-- EngineFault        the engine failed this request, or broke the protocol

Any other exception raised while a call is served is a defect: INTERNAL, logged with its traceback.
"""

import random
from typing import ClassVar

_RETRY_STEPS = 32


class FrontendError(Exception):
    """Base class of the frontend's errors."""


class ConfigError(FrontendError):
    """A flag or the machine prevents the frontend from starting."""


class TokenizerMismatch(FrontendError):  # noqa: N818 - reads as the reason it is
    """The tokenizer's files are not those the engine's model was loaded with."""


class RequestError(FrontendError):
    """Ends one call.

    Args:
        message: for the client: names the field and the numbers.
        retry_after_s: seconds after which a retry may succeed; None: waiting does not help.

    Attributes:
        reason: code for programs: gRPC's ErrorInfo, metrics and traces carry it.
    """

    reason: ClassVar[str]

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        # Names in JSON may contain half a surrogate pair, which neither API can send.
        self.message = message.encode(errors="backslashreplace").decode()
        super().__init__(self.message)
        self.retry_after_s = retry_after_s

    def draw_retry_s(self) -> float | None:
        """Returns a random number of seconds for the client to wait, from `retry_after_s` to twice as many: clients
        that are refused together must not come back together. There are few of them, so that answers can be cached.
        """
        if self.retry_after_s is None:
            return None
        return self.retry_after_s * (1 + random.randrange(_RETRY_STEPS) / _RETRY_STEPS)


class InvalidRequest(RequestError):  # noqa: N818
    """A field has a value that cannot be served.

    Args:
        message: what is wrong, with the numbers.
        field: path in the request message, as in `spec.sampling.temperature`; empty if no single field is at fault.
    """

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context or the engine's KV cache."""

    reason = "REQUEST_TOO_LONG"


class Unauthenticated(RequestError):  # noqa: N818
    """The call carries none of the server's API keys."""

    reason = "UNAUTHENTICATED"


class ModelNotFound(RequestError):  # noqa: N818
    """The request names a model that is not served here."""

    reason = "MODEL_NOT_FOUND"


class QueueFull(RequestError):  # noqa: N818
    """The admission queue is full."""

    reason = "QUEUE_FULL"


class TargetsInfeasible(RequestError):  # noqa: N818
    """The first token cannot be in time.

    Args:
        message: the prediction and the target.
        retry_after_s: seconds until the slot that was booked; None: no slot within the horizon.
        retry_ticket: presents the booking at the retry; empty without a slot.
    """

    reason = "TARGETS_INFEASIBLE"

    def __init__(self, message: str, *, retry_after_s: float | None = None, retry_ticket: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_ticket = retry_ticket

    def draw_retry_s(self) -> float | None:
        """Returns `retry_after_s`: a slot is booked for one client."""
        return self.retry_after_s


class DeadlineExceeded(RequestError):  # noqa: N818
    """The call's deadline passed before its answer was complete."""

    reason = "DEADLINE_EXCEEDED"


class EngineUnavailable(RequestError):  # noqa: N818
    """No engine accepts requests: none is connected, or all are draining."""

    reason = "ENGINE_UNAVAILABLE"


class WorkerUnavailable(RequestError):  # noqa: N818
    """The process for chat templates or grammars could not be started, such as for lack of memory on the machine."""

    reason = "WORKER_UNAVAILABLE"


class ServerDraining(RequestError):  # noqa: N818
    """This frontend is shutting down: it finishes running calls and accepts no new ones."""

    reason = "SERVER_DRAINING"


class ClientStalled(RequestError):  # noqa: N818
    """The client did not read its answer for too long."""

    reason = "CLIENT_STALLED"


class EngineFault(RequestError):  # noqa: N818
    """The engine failed this request, or violated the protocol."""

    reason = "ENGINE_FAULT"


def error_reason(error: BaseException | None) -> str:
    """Returns the error's code; any exception but a RequestError is a defect."""
    return error.reason if isinstance(error, RequestError) else "INTERNAL_ERROR"
