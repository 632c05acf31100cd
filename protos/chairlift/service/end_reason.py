"""Why a request ended: one vocabulary from the engine to HTTP.

The wire value, the public value, OpenAI's string and the metrics label are derived from it. Standard library only.
"""

from collections.abc import Iterable
from enum import Enum, auto


class EndReason(Enum):
    """Why a request ended. Every name is the part behind the prefix of an enum value in the protos."""

    END_TOKEN = auto()
    STOP_TOKEN = auto()
    STOP_TEXT = auto()
    MAX_TOKENS = auto()
    CONTEXT_FULL = auto()
    TIME_BUDGET = auto()
    CANCELLED = auto()
    DEADLINE = auto()
    ENGINE_ERROR = auto()
    INFEASIBLE = auto()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete: the request was neither cancelled nor refused, and did not fail."""
        return self not in _INCOMPLETE

    @property
    def finish_reason(self) -> str:
        """OpenAI's `finish_reason` and the metrics label of a complete answer: "stop" or "length"."""
        return "length" if self in _CUT_OFF else "stop"


_INCOMPLETE = frozenset({EndReason.CANCELLED, EndReason.DEADLINE, EndReason.ENGINE_ERROR, EndReason.INFEASIBLE})
_CUT_OFF = frozenset({EndReason.MAX_TOKENS, EndReason.CONTEXT_FULL, EndReason.TIME_BUDGET})


def reasons_by_value(enum_items: Iterable[tuple[str, int]]) -> dict[int, EndReason]:
    """Maps the values of a proto enum to reasons. The other way is the name: `f"FINISH_REASON_{reason.name}"`.

    Args:
        enum_items: names and values, `pb.FinishReason.items()` for example. UNSPECIFIED has no reason.
    """
    named = ((name.partition("_REASON_")[2], value) for name, value in enum_items)
    return {value: EndReason[name] for name, value in named if name != "UNSPECIFIED"}
