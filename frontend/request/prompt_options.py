"""Options of tokenizing a prompt: special tokens and truncation."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.errors import InvalidRequest
from frontend.text.served_model import ServedModel

WHAT_FITS = -1


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How a prompt is tokenized.

    Attributes:
        add_special_tokens: whether the tokenizer adds special tokens such as a leading bos. None: to texts, but not to
            conversations, whose template contains them.
        truncate_to: most tokens to keep; `WHAT_FITS`: as many as fit beside the answer. None: no truncation.
        keep_first: keep the first tokens, not the last.
    """

    add_special_tokens: bool | None = None
    truncate_to: int | None = None
    keep_first: bool = False

    def truncation(self, model: ServedModel, num_output_tokens: int) -> "Truncation | None":
        """Returns the truncation to apply, or None.

        Args:
            num_output_tokens: capacity left for the answer.

        Raises:
            InvalidRequest: `truncate_to` is out of range.
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
    """Truncates a prompt to a number of tokens.

    Attributes:
        max_tokens: most tokens to keep.
        keep_first: see `PromptOptions`.
    """

    max_tokens: int
    keep_first: bool

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens to keep."""
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[: self.max_tokens] if self.keep_first else token_ids[-self.max_tokens :]
