"""Contestants in turn, so that whatever slows the machine slows all of them: A B A B, never A A B B."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Ratio(NamedTuple):
    """One contestant's figure over another's.

    Attributes:
        best: best over best: what the two can do.
        low, high: the least and the greatest ratio within one round: how far to trust it.
    """

    best: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.best:.2f} ({self.low:.2f}..{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw measurements, less is better.

    Attributes:
        raw: per contestant one value per round, in order; warm-up rounds are not among them.
    """

    raw: Mapping[str, tuple[float, ...]]

    def best(self, name: str) -> float:
        """The least value of a contestant."""
        return min(self.raw[name])

    def median(self, name: str) -> float:
        """The middle value of a contestant."""
        return statistics.median(self.raw[name])

    def ratio(self, a: str, b: str) -> Ratio:
        """How many times b's figure a's is: above 1 if b was faster."""
        pairs = [x / y for x, y in zip(self.raw[a], self.raw[b], strict=True)]
        return Ratio(self.best(a) / self.best(b), min(pairs), max(pairs))


def alternate(
    contestants: Mapping[str, Callable[[], float]],
    *,
    rounds: int = 5,
    warm_up: int = 1,
    progress: Callable[[str], None],
) -> Samples:
    """Runs all contestants once per round, in the order given.

    Args:
        contestants: by name; each runs once and returns what it measured, in seconds unless its name says otherwise.
        rounds: rounds that count.
        warm_up: rounds before, that do not.
        progress: told every value.
    Raises: ValueError: fewer than one round, or no contestant.
    """
    if rounds < 1 or not contestants:
        raise ValueError(f"rounds is {rounds}, contestants are {len(contestants)}: at least 1 of each is needed")
    raw: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(-warm_up, rounds):
        for name, contestant in contestants.items():
            value = contestant()
            label = f"round {index + 1} of {rounds}" if index >= 0 else "warm-up"
            progress(f"{label}: {name} {value:.4g}")
            if index >= 0:
                raw[name].append(value)
    return Samples({name: tuple(values) for name, values in raw.items()})
