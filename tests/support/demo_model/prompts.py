"""Held-out prompts, as users would send them: beginnings of plain stories and chat messages, none of them trained on.

Needs no torch, so that servers, load generators and tests can all send the demo model something it can answer.
"""

from dataclasses import dataclass
from enum import StrEnum

from tests.support.demo_model.documents import Role, document

HELD_OUT_SPLIT = "held-out"
_MIN_PROMPT_WORDS = 3
_MAX_PROMPT_WORDS = 16


class PromptKind(StrEnum):
    """How the prompt is sent: as text to continue, or as a user's message through the chat template."""

    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """One prompt. For a chat, `text` is the user's message without markup."""

    kind: PromptKind
    text: str


def heldout_prompts(count: int, seed: int = 1) -> list[HeldOutPrompt]:
    """The first `count` held-out prompts of a seed, all different: about 3 in 10 plain texts, the rest chats."""
    prompts: dict[HeldOutPrompt, None] = {}
    index = 0
    while len(prompts) < count:
        drawn = document(HELD_OUT_SPLIT, seed, index)
        if drawn.turns:
            question = next(turn.text for turn in drawn.turns if turn.role is Role.USER)
            prompts[HeldOutPrompt(PromptKind.CHAT, question)] = None
        else:
            num_words = _MIN_PROMPT_WORDS + index % (_MAX_PROMPT_WORDS - _MIN_PROMPT_WORDS + 1)
            beginning = " ".join(drawn.text.split()[:num_words])
            prompts[HeldOutPrompt(PromptKind.TEXT, beginning)] = None
        index += 1
    return list(prompts)
