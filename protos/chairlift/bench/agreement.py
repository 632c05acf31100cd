"""Greedy ids compared with a reference model's own choices, position by position.

Two correct programs add in different orders. Where the two best logits are closer than rounding error either token is
right, and everything after it differs; so each position is judged on its own, after the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.bench.benchmark import BenchmarkError

# Logits here are near unit scale; fp32 sums of a few thousand terms differ by about 1e-5.
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """Answers compared with the reference's choice at each position.

    Attributes:
        num_tokens: positions compared.
        num_same: positions with the reference's token.
        num_near_ties: of the others, those where it is at most NEAR_TIE behind the reference's best.
        worst_gap: largest distance of a chosen logit to the best one.
    """

    num_tokens: int
    num_same: int
    num_near_ties: int
    worst_gap: float

    @property
    def num_wrong(self) -> int:
        """Positions where the token is wrong."""
        return self.num_tokens - self.num_same - self.num_near_ties

    @property
    def share_same(self) -> float:
        """Share of positions with the reference's token."""
        return self.num_same / self.num_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_same} of {self.num_tokens} ids are transformers', {self.num_near_ties} are near-ties, "
            f"worst gap {self.worst_gap:.2g}"
        )


def require_same_ids(name: str, agreement: Agreement) -> None:
    """Requires that rounding explains every difference.

    Raises: BenchmarkError: a position has a wrong token.
    """
    if agreement.num_wrong:
        raise BenchmarkError(f"{name}: {agreement.num_wrong} ids are wrong; {agreement}")


def require_equal_ids(what: str, answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
    """Requires the same answers of two runs.

    Raises: BenchmarkError: an answer differs; names the first difference.
    """
    for index, (answer, other) in enumerate(zip(answers, others, strict=True)):
        if tuple(answer) != tuple(other):
            pairs = enumerate(zip(answer, other, strict=True))
            position = next(position for position, (a, b) in pairs if a != b)
            raise BenchmarkError(f"{what}: answers of request {index} differ from token {position} on")
