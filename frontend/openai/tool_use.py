"""Which tools an answer may call and which it must, whatever API the request came by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one conversation, each in the form of Chat Completions.

    Attributes:
        offered: shown to the model.
        required: one of these must be called; empty: no call must be made.
        one_call: at most one call per answer.
    """

    offered: Sequence[dict[str, Any]] = ()
    required: Sequence[dict[str, Any]] = ()
    one_call: bool = False
