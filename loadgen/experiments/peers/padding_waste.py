"""What padding costs: tokens of rectangular batches that nobody asked for."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """What a batch of `generate` was made of.

    Attributes:
        prompt_lens, max_tokens: [rows] as asked for.
        num_positions: of every row of the prompt tensor, padding included.
        num_steps: tokens generated for every row.
    """

    prompt_lens: tuple[int, ...]
    max_tokens: tuple[int, ...]
    num_positions: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Waste:
    """What padded batches computed beside what was asked for. Tokens are rows times positions.

    Attributes:
        useful: of prompts, and of answers up to what was asked for.
        prompt_padding: in front of prompts shorter than the longest of their batch.
        idle_rows: after the end of answers shorter than the longest of their batch.
    """

    useful: int
    prompt_padding: int
    idle_rows: int

    @property
    def computed(self) -> int:
        """All of them."""
        return self.useful + self.prompt_padding + self.idle_rows

    @property
    def share(self) -> float:
        """Of all that was computed, what nobody asked for."""
        return 1 - self.useful / self.computed


def waste_of(batches: Sequence[PaddedBatch]) -> Waste:
    """Counts the tokens of padded batches. An answer's last token is sampled and never computed."""
    useful = padding = idle = 0
    for batch in batches:
        prompts, answers = batch.prompt_lens, batch.max_tokens
        useful += sum(prompts) + sum(answers) - len(answers)
        padding += sum(batch.num_positions - length for length in prompts)
        idle += sum(batch.num_steps - length for length in answers)
    return Waste(useful, padding, idle)
