"""Length of a prompt before it is tokenized."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from chairlift.v1 import generation_service_pb2 as pb
from frontend.request.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt

CHARS_PER_TOKEN = 4
"""Before anything is known of a model's tokens."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Length of one prompt, or of the prompts of one call together.

    Attributes:
        num_chars: of a text; 0: the prompt is token ids.
        num_tokens: of token ids.
    """

    num_chars: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """Returns the size of a checked prompt."""
        match prompt:
            case TextPrompt(text):
                return cls(num_chars=len(text))
            case ChatPrompt():
                return cls(num_chars=prompt.num_chars)
            case TokenPrompt(token_ids):
                return cls(num_tokens=len(token_ids))

    @classmethod
    def of_specs(cls, specs: Sequence[pb.GenerationSpec]) -> Self:
        """Returns the size of all prompts of a call, texts or token ids."""
        return cls(sum(len(spec.text) for spec in specs), sum(len(spec.token_ids.ids) for spec in specs))

    @property
    def plain_tokens(self) -> int:
        """Tokens by a fixed ratio: an estimate that does not change with what is learned."""
        return self.num_tokens or -(-self.num_chars // CHARS_PER_TOKEN)
