"""How many engines meet the targets: a search over the size of the fleet."""

from collections.abc import Callable
from typing import NamedTuple


class Sizing(NamedTuple):
    """The answer.

    Attributes:
        num_engines: the smallest fleet that was found to reach the goal; None: not even the largest one does.
        tried: (engines, share of good requests), in the order of the search.
    """

    num_engines: int | None
    tried: tuple[tuple[int, float], ...]


def engines_for(good_share: Callable[[int], float], goal: float, max_engines: int) -> Sizing:
    """Returns the smallest number of engines whose share of good requests reaches a goal.

    Doubles the fleet until it does, then bisects: about 2 log2(n) simulations. The share is taken to rise with the
    number of engines. Near the goal it may not, by the luck of placement; then a neighbour would do as well.

    Args:
        good_share: simulates a fleet of a size.
        goal: share of good requests, above 0 and at most 1.
        max_engines: the largest fleet to try.
    """
    tried: list[tuple[int, float]] = []

    def is_enough(num_engines: int) -> bool:
        share = good_share(num_engines)
        tried.append((num_engines, share))
        return share >= goal

    low, high = 0, 1  # low is not enough
    while not is_enough(high):
        if high >= max_engines:
            return Sizing(None, tuple(tried))
        low, high = high, min(2 * high, max_engines)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return Sizing(high, tuple(tried))
