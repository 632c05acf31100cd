"""Errors of the engine.

EngineError
|-- ConfigError          a flag or the machine: says what to change, with numbers; exit status 2
|-- CheckpointError      the model's files: names the file; exit status 2
|-- StepError            a step failed as a whole: the process reports it and exits with status 1
|   `-- DeviceError      the device did: one line, and the process ends at once, for nothing on it can be used again
|-- IntegrityError       our own books contradict each other, a defect: one line, and the process ends with status 1
`-- RequestError         one request: becomes a Rejection on the wire
|-- InvalidRequest   a field has a value that cannot be served
|-- RequestTooLong   cannot fit the context or the empty cache
|-- QueueFull        try again later
`-- EngineDraining   try another engine, or this one after its restart
"""


class EngineError(Exception):
    """Any error of the engine."""


class ConfigError(EngineError):
    """A flag, or a model that does not fit this machine."""


class CheckpointError(EngineError):
    """A model folder that cannot be loaded.

    The message quotes names and values from the model's files. It stays one line of moderate length, and nothing in it
    reaches a terminal as a control character.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


_MAX_MESSAGE_CHARS = 1000


def _one_line(message: str) -> str:
    shown = message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown)


class StepError(EngineError):
    """A step failed as a whole; the engine's state can no longer be trusted."""


class DeviceError(StepError):
    """The device has failed, and with it all memory of it that this process has."""


class IntegrityError(EngineError):
    """A check_integrity() found a contradiction: a defect of ours."""


class RequestError(EngineError):
    """One request cannot be accepted; nobody else is affected."""


class InvalidRequest(RequestError):  # noqa: N818 - reads as the reason it is
    """A field has a value that cannot be served."""


class RequestTooLong(RequestError):  # noqa: N818
    """Longer than the context or than the whole cache."""


class QueueFull(RequestError):  # noqa: N818
    """The waiting queue is at its bound."""


class EngineDraining(RequestError):  # noqa: N818
    """The engine finishes what it has and takes nothing new."""
