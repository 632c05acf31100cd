"""Runs systems under test in turn (A B A B, never A A B B), so that a slow phase of the machine affects all of them."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Ratio(NamedTuple):
    """Ratio of one system's figure to another's.

    Attributes:
        best: best over best.
        low, high: smallest and largest ratio within one round: the uncertainty.
    """

    best: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.best:.2f} ({self.low:.2f}..{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw measurements; less is better.

    Attributes:
        raw: by system, one value per round, in order, without warm-up rounds.
    """

    raw: Mapping[str, tuple[float, ...]]

    def best(self, name: str) -> float:
        """Smallest value of a system."""
        return min(self.raw[name])

    def median(self, name: str) -> float:
        """Median value of a system."""
        return statistics.median(self.raw[name])

    def ratio(self, a: str, b: str) -> Ratio:
        """Ratio of a's figure to b's: above 1 if b was faster."""
        pairs = [x / y for x, y in zip(self.raw[a], self.raw[b], strict=True)]
        return Ratio(self.best(a) / self.best(b), min(pairs), max(pairs))


def alternate(
    systems: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 1,
    progress: Callable[[str], None],
) -> Samples:
    """Runs all systems once per round, in the order given.

    Args:
        systems: by name; each call runs one round and returns its figure, in seconds unless its name says otherwise.
        rounds: measured rounds.
        warm_up: rounds before these.
        progress: called with every value.
    Raises: ValueError: fewer than one round, or no system.
    """
    if rounds < 1 or not systems:
        raise ValueError(f"rounds is {rounds} and there are {len(systems)} systems; at least 1 of each is needed")
    raw: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(-warm_up, rounds):
        for name, measure in systems.items():
            value = measure()
            label = f"round {index + 1} of {rounds}" if index >= 0 else "warm-up"
            progress(f"{label}: {name} {value:.4g}")
            if index >= 0:
                raw[name].append(value)
    return Samples({name: tuple(values) for name, values in raw.items()})
