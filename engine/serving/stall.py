"""Detects a stalled step loop from samples taken at a fixed interval. Pure: the caller keeps the time.

A long step is no stall: computing threads count their work, and the samples show the count change. Work without a
count, such as Python between two kernels, is compared with this engine's history: a pause is a stall when it lasts
several times as long as any earlier pause.
"""

MIN_STALL_S = 2.5
"""Shortest pause that counts as a stall. With sampling and the message to the frontend, this makes three seconds."""

_MARGIN = 4  # multiple of the longest earlier pause


class StallMeter:
    """Counts pauses in samples, not by the clock: a process that was suspended has not stalled.

    Args:
        check_interval_s: interval between two samples.
    """

    def __init__(self, check_interval_s: float) -> None:
        self._min_samples = MIN_STALL_S / check_interval_s
        self._mark: object = None
        self._num_same = 0
        self._longest = 0  # longest pause that ended, in samples

    def observe(self, mark: object) -> bool:
        """Takes a sample and returns whether the loop is stalled.

        Args:
            mark: a value that changes with any progress.
        """
        if mark != self._mark:
            self._longest = max(self._longest, self._num_same)
            self._mark, self._num_same = mark, 0
        else:
            self._num_same += 1
        return self._num_same >= max(self._min_samples, _MARGIN * self._longest)
