"""Whether the step loop gets anything done, judged from look to look. Pure: whoever looks keeps the time.

A long step is no stall: threads that compute count what they have done, and whoever looks sees the count change. What
no count shows, such as Python between two kernels, is measured by this engine's own past: a pause is suspicious when it
lasts several times as long as any pause before that ended.
"""

MIN_STALL_S = 2.5
"""No shorter pause is a stall: with the look before it and the message behind it, three seconds have passed."""

_MARGIN = 4  # times the longest pause that ended


class StallMeter:
    """Pauses are counted in looks, not by the clock: a process that was stopped has not stalled.

    Args:
        look_every_s: pause between two looks.
    """

    def __init__(self, look_every_s: float) -> None:
        self._min_looks = MIN_STALL_S / look_every_s
        self._mark: object = None
        self._num_same = 0
        self._longest = 0  # pause that ended, in looks

    def look(self, mark: object) -> bool:
        """Whether the loop stalls now.

        Args:
            mark: what changes with whatever gets done.
        """
        if mark != self._mark:
            self._longest = max(self._longest, self._num_same)
            self._mark, self._num_same = mark, 0
        else:
            self._num_same += 1
        return self._num_same >= max(self._min_looks, _MARGIN * self._longest)
