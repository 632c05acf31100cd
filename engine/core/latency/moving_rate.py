"""A rate per second, averaged over the recent past."""

import math


class MovingRate:
    """Events per second, with weights that fall exponentially with age.

    Counts and seconds are averaged apart, so that a long sample weighs as much as the many short ones it equals.
    """

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._count = 0.0
        self._elapsed_s = 0.0

    @property
    def per_s(self) -> float | None:
        """The rate; None before the first sample."""
        return self._count / self._elapsed_s if self._elapsed_s > 0.0 else None

    def add(self, count: float, elapsed_s: float) -> None:
        """Counts events in the next `elapsed_s` seconds; ignores a duration that is not positive."""
        if elapsed_s > 0.0:
            weight = math.exp(-elapsed_s / self._time_constant_s)
            self._count = weight * self._count + count
            self._elapsed_s = weight * self._elapsed_s + elapsed_s
