"""Log-probabilities of output tokens and prompts, in columns. Knows neither text nor protos."""

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field

LOWEST = -9999.0
"""OpenAI's substitute for minus infinity, which JSON lacks."""


@dataclass(slots=True)
class LogprobBatch:
    """Log-probabilities of some tokens in columns: `top_ids` and `top_values` hold `top_width` entries per token."""

    top_width: int = 0
    chosen: MutableSequence[float] = field(default_factory=list)
    top_ids: MutableSequence[int] = field(default_factory=list)
    top_values: MutableSequence[float] = field(default_factory=list)

    def extend(self, other: "LogprobBatch") -> None:
        """Appends the columns of `other`, which has the same width."""
        self.top_width = other.top_width
        self.chosen += other.chosen
        self.top_ids += other.top_ids
        self.top_values += other.top_values

    def cut(self, start: int, stop: int | None = None) -> "LogprobBatch":
        """Returns the columns of the tokens from `start` to `stop`, or to the end."""
        tops = slice(start * self.top_width, None if stop is None else stop * self.top_width)
        return LogprobBatch(self.top_width, self.chosen[start:stop], self.top_ids[tops], self.top_values[tops])


class PromptLogprobs:
    """Collects the log-probabilities of one prompt. The first token has none.

    Keeps the columns as they arrive, because converting a long prompt's to Python objects would block the event loop.

    Args:
        top_width: requested alternatives per token.
        num_prompt_tokens: number of tokens in the prompt.
    """

    def __init__(self, *, top_width: int, num_prompt_tokens: int) -> None:
        self.top_width = top_width
        self._num_prompt_tokens = num_prompt_tokens
        self._parts: list[LogprobBatch] = []
        self._num_known = 0

    @property
    def num_missing(self) -> int:
        """Number of tokens whose log-probabilities have not arrived."""
        return self._num_prompt_tokens - 1 - self._num_known

    def pieces(self, num_tokens: int) -> Iterator[LogprobBatch]:
        """Yields the columns so far, from the second token on, in pieces of at most `num_tokens`."""
        for part in self._parts:
            for start in range(0, len(part.chosen), num_tokens):
                yield part.cut(start, start + num_tokens)

    def add(self, start_index: int, columns: LogprobBatch) -> None:
        """Takes the columns of the tokens from `start_index` on; drops those of known tokens.

        Raises:
            ValueError: tokens are missing before them, they exceed the prompt, or they have another width.
        """
        num_tokens, next_index = len(columns.chosen), self._num_known + 1
        if not 1 <= start_index <= next_index or start_index + num_tokens > self._num_prompt_tokens:
            raise ValueError(
                f"prompt log-probabilities of {num_tokens} tokens from {start_index} on, when {next_index} was next of "
                f"{self._num_prompt_tokens}"
            )
        width, num_tops = self.top_width, (len(columns.top_ids), len(columns.top_values))
        if columns.top_width != width or num_tops != (num_tokens * width,) * 2:
            raise ValueError(
                f"prompt log-probabilities of {num_tokens} tokens, width {columns.top_width}, with {num_tops[0]} ids "
                f"and {num_tops[1]} values; the width asked for is {width}"
            )
        num_new = start_index + num_tokens - next_index
        if num_new > 0:
            self._parts.append(columns if num_new == num_tokens else columns.cut(num_tokens - num_new))
            self._num_known += num_new
