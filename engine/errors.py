"""Errors of the engine.

EngineError
|-- ConfigError          a flag or the machine: says what to change, with numbers; exit status 2
|-- CheckpointError      the model's files: names the file; exit status 2
|-- StepError            a whole step failed: logged; exit status 1
|   `-- DeviceError      the device failed: one line, immediate exit with status 1
|-- IntegrityError       the KV cache accounting is inconsistent, a defect: one line; exit status 1
`-- RequestError         one request: becomes a Rejection on the wire
    |-- InvalidRequest   a field has a value that cannot be served
    |-- AdapterNotFound  the adapter with the digest that was asked for is not loaded
    |-- NoFreeAdapterSlot  all places of adapters are taken
    |-- RequestTooLong   exceeds the context or the empty cache
    |-- QueueFull        retry later
    `-- EngineDraining   retry on another engine, or on this one after its restart
"""


class EngineError(Exception):
    """Any error of the engine."""


class ConfigError(EngineError):
    """A flag is invalid, or the model does not fit this machine."""


class CheckpointError(EngineError):
    """A model folder cannot be loaded.

    The message quotes names and values from the model's files. It is limited to one line of printable characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


_MAX_MESSAGE_CHARS = 1000


def _one_line(message: str) -> str:
    shown = message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


class StepError(EngineError):
    """A whole step failed; the engine must not continue."""


class DeviceError(StepError):
    """The device failed; its memory is lost for this process."""


class IntegrityError(EngineError):
    """A consistency check failed, because of a defect."""


class RequestError(EngineError):
    """One request cannot be accepted; others are unaffected."""


class InvalidRequest(RequestError):  # noqa: N818 - reads as the reason it is
    """A field has a value that cannot be served."""


class RequestTooLong(RequestError):  # noqa: N818
    """Longer than the context or than the whole cache."""


class QueueFull(RequestError):  # noqa: N818
    """The waiting queue is at its bound."""


class EngineDraining(RequestError):  # noqa: N818
    """The engine finishes its open requests and accepts no new ones."""


class AdapterNotFound(RequestError):  # noqa: N818
    """The adapter with the digest that was asked for is not loaded."""


class NoFreeAdapterSlot(RequestError):  # noqa: N818
    """All places of adapters are taken; some may be free later."""
