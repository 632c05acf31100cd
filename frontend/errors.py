"""Errors of the frontend.

    FrontendError
    |-- ConfigError            a flag or this machine: says what to change; exit status 2
    |-- TokenizerMismatch      the tokenizer at hand is not the engine's; health stays NOT_SERVING
    `-- RequestError           ends one call; `status.py` has the one table from class to gRPC status
        |-- InvalidRequest     a field has a value that cannot be served; names the field
        |   `-- RequestTooLong prompt and answer do not fit the model's context
        |-- Unauthenticated    no valid API key
        |-- ModelNotFound      no such model here
        |-- QueueFull          as much is waiting as may wait; try again later
        |-- DeadlineExceeded   the call's deadline passed in a queue
        |-- EngineUnavailable  no engine, or it went away; try again later
        |-- ServerDraining     this frontend is stopping
        |-- ClientStalled      the client stopped reading its answer
        `-- EngineFault        the engine failed this request, or broke the protocol

Whatever else is raised while a call is served is a defect: INTERNAL, logged with its traceback.
"""


class FrontendError(Exception):
    """Any error of the frontend."""


class ConfigError(FrontendError):
    """A flag, or something about this machine, that keeps the frontend from starting."""


class TokenizerMismatch(FrontendError):  # noqa: N818 - reads as the reason it is
    """The tokenizer's files are not those the engine's model was loaded with."""


class RequestError(FrontendError):
    """Ends one call.

    Args:
        message: for the client: names the field and the numbers.
        retry_after_s: when trying again may help, seconds; None: waiting does not help.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):  # noqa: N818
    """A field has a value that cannot be served.

    Args:
        message: what is wrong, with the numbers.
        field: path in the request message, as in `spec.sampling.temperature`; empty if no single field is at fault.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context, or the engine's whole cache."""


class Unauthenticated(RequestError):  # noqa: N818
    """The call carries none of the server's API keys."""


class ModelNotFound(RequestError):  # noqa: N818
    """The request names a model that is not served here."""


class QueueFull(RequestError):  # noqa: N818
    """As much is waiting as may wait."""


class DeadlineExceeded(RequestError):  # noqa: N818
    """The call's deadline passed before its answer was complete."""


class EngineUnavailable(RequestError):  # noqa: N818
    """There is no engine, or it went away, or it takes nothing new."""


class ServerDraining(RequestError):  # noqa: N818
    """This frontend finishes what it has and takes nothing new."""


class ClientStalled(RequestError):  # noqa: N818
    """The client did not read its answer for too long."""


class EngineFault(RequestError):  # noqa: N818
    """The engine failed this request, or sent what the protocol forbids."""
