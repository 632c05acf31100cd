"""Heartbeat liveness: whether an engine's step loop still turns. Pure: times of time.monotonic() in.

An engine whose device hangs still sends a heartbeat every quarter of a second, from another thread. Each heartbeat says
how many turns the step loop has made, idle ones included.
"""

_MIN_STATUSES = 8  # two seconds of the engine's own clock, so that a delay of this process is not taken for a hang


class Heartbeat:
    """The step loop's turns on one stream so far.

    Args:
        timeout_s: how long the loop may go without a turn, which is how long a step may take; 0: no limit.
        num_turns: from the engine's welcome.
        now_s: when it came.
    """

    def __init__(self, *, timeout_s: float, num_turns: int, now_s: float) -> None:
        self._timeout_s = timeout_s
        self.num_turns = num_turns
        self._since_s = now_s
        self._num_statuses = 0

    def note(self, num_turns: int, now_s: float) -> None:
        """Takes a heartbeat."""
        if num_turns != self.num_turns:
            self.num_turns, self._since_s, self._num_statuses = num_turns, now_s, 0
        self._num_statuses += 1

    def has_stopped(self, now_s: float) -> bool:
        """Whether the loop has been stuck for too long. An engine that reports no turns never is."""
        return (
            self.num_turns > 0 and 0 < self._timeout_s <= now_s - self._since_s and self._num_statuses >= _MIN_STATUSES
        )
