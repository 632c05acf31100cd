"""Log-probabilities of tokens in columns, and those of a prompt while they arrive. Knows neither text nor protos."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class LogprobBatch:
    """Log-probabilities of some tokens in columns: `top_ids` and `top_values` hold `top_width` entries per token."""

    top_width: int = 0
    chosen: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    top_values: list[float] = field(default_factory=list)

    def extend(self, other: "LogprobBatch") -> None:
        """Appends the columns of `other`, which has the same width."""
        self.top_width = other.top_width
        self.chosen += other.chosen
        self.top_ids += other.top_ids
        self.top_values += other.top_values

    def first(self, num_tokens: int) -> "LogprobBatch":
        """The columns of the first tokens."""
        num_tops = num_tokens * self.top_width
        return LogprobBatch(
            self.top_width, self.chosen[:num_tokens], self.top_ids[:num_tops], self.top_values[:num_tops]
        )

    def without_first(self, num_tokens: int) -> "LogprobBatch":
        """The columns of all but the first tokens."""
        num_tops = num_tokens * self.top_width
        return LogprobBatch(
            self.top_width, self.chosen[num_tokens:], self.top_ids[num_tops:], self.top_values[num_tops:]
        )


class PromptLogprobs:
    """Log-probabilities of one prompt while they arrive. The first token has none: nothing comes before it.

    Args:
        top_width: alternatives per token, as asked for.
        num_prompt_tokens: tokens of the prompt.

    Attributes:
        columns: what has arrived; entry i belongs to token i + 1.
    """

    def __init__(self, *, top_width: int, num_prompt_tokens: int) -> None:
        self.columns = LogprobBatch(top_width)
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens whose log-probabilities have not arrived."""
        return self._num_prompt_tokens - 1 - len(self.columns.chosen)

    def add(self, start_index: int, columns: LogprobBatch) -> None:
        """Takes those of the tokens from `start_index` on; what is known already is dropped.

        Raises:
            ValueError: they leave a gap, are more than the prompt has, or are not as wide as was asked.
        """
        num_tokens, next_index = len(columns.chosen), len(self.columns.chosen) + 1
        if not 1 <= start_index <= next_index or start_index + num_tokens > self._num_prompt_tokens:
            raise ValueError(
                f"prompt log-probabilities of {num_tokens} tokens from {start_index} on, when {next_index} was next of "
                f"{self._num_prompt_tokens}"
            )
        width, num_tops = self.columns.top_width, (len(columns.top_ids), len(columns.top_values))
        if columns.top_width != width or num_tops != (num_tokens * width,) * 2:
            raise ValueError(
                f"prompt log-probabilities of {num_tokens} tokens, width {columns.top_width}, with {num_tops[0]} ids "
                f"and {num_tops[1]} values; the width asked for is {width}"
            )
        self.columns.extend(columns.without_first(next_index - start_index))
