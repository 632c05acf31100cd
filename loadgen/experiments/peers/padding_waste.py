"""Cost of padding: tokens that rectangular batches compute and nobody requested. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Waste:
    """Tokens that padded batches computed: rows times positions.

    Attributes:
        useful: of prompts, and of answers up to the requested length.
        prompt_padding: in front of prompts shorter than the longest of their batch.
        idle_rows: after the end of answers shorter than the longest of their batch.
    """

    useful: int
    prompt_padding: int
    idle_rows: int

    @property
    def computed(self) -> int:
        """All tokens."""
        return self.useful + self.prompt_padding + self.idle_rows

    @property
    def share(self) -> float:
        """Share of the computed tokens that were not requested."""
        return 1 - self.useful / self.computed


def waste_of(workload: Workload, batch_size: int, batches: Sequence[tuple[int, int]]) -> Waste:
    """Counts the tokens of padded batches. An answer's last token is sampled and never computed.

    Args:
        workload: requests in the order in which batches are filled.
        batch_size: rows of a full batch.
        batches: of each batch, columns of the prompt tensor and tokens generated for every row.
    """
    useful = padding = idle = 0
    for index, (num_positions, num_steps) in enumerate(batches):
        rows = slice(index * batch_size, (index + 1) * batch_size)
        prompts, answers = list(map(len, workload.prompts[rows])), workload.max_tokens[rows]
        useful += sum(prompts) + sum(answers) - len(answers)
        padding += sum(num_positions - length for length in prompts)
        idle += sum(num_steps - length for length in answers)
    return Waste(useful, padding, idle)
