"""How a prompt becomes token ids, beyond its text: special tokens, and which part of it is kept if it is long."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.errors import InvalidRequest
from frontend.text.served_model import ServedModel

WHAT_FITS = -1


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request says of its prompt.

    Attributes:
        add_special_tokens: the tokenizer adds its own, a leading bos, say. None: to a text, and not to a conversation,
            whose template writes them.
        truncate_to: most tokens to keep; `WHAT_FITS`: as many as fit beside the answer. None: none is dropped.
        keep_first: the tokens that are kept are the first ones, not the last.
    """

    add_special_tokens: bool | None = None
    truncate_to: int | None = None
    keep_first: bool = False

    def truncation(self, model: ServedModel, num_output_tokens: int) -> "Truncation | None":
        """What is kept of the prompt; None: all of it.

        Args:
            num_output_tokens: room for the answer.

        Raises:
            InvalidRequest: `truncate_to` keeps nothing.
        """
        if self.truncate_to is None:
            return None
        if self.truncate_to != WHAT_FITS and self.truncate_to < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {self.truncate_to}, it must be at least 1, or {WHAT_FITS} for what fits",
                field="truncate_prompt_tokens",
            )
        fits = max(model.max_model_len - num_output_tokens, 1)
        return Truncation(fits if self.truncate_to == WHAT_FITS else self.truncate_to, self.keep_first)


@dataclass(frozen=True, slots=True)
class Truncation:
    """A prompt cut to a number of tokens.

    Attributes:
        max_tokens: most that are kept.
        keep_first: see `PromptOptions`.
    """

    max_tokens: int
    keep_first: bool

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are kept."""
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[: self.max_tokens] if self.keep_first else token_ids[-self.max_tokens :]
