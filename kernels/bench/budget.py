"""Wall-clock limit of a run: cases that do not fit are left out."""

import time
from collections.abc import Callable


class Budget:
    """A time limit that starts now.

    Args:
        seconds: the limit.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end_s - self._clock())

    def allows(self, seconds: float) -> bool:
        """Tells whether something that takes this long still fits."""
        return seconds <= self.left_s
