"""Detects an engine whose step loop hangs, from its heartbeats. Pure: the caller passes values of time.monotonic().

An engine whose device hangs still sends a heartbeat every quarter of a second, from another thread. Each heartbeat
contains the number of iterations (turns) of the step loop, including idle ones.
"""

_MIN_STATUSES = 8  # two seconds of the engine's clock, so that a delay of this process does not look like a hang


class Heartbeat:
    """Tracks the turns of one engine's step loop.

    Args:
        timeout_s: maximum time without a turn, which limits the duration of a step; 0 disables.
        num_turns: turns reported in the engine's Welcome.
        now_s: when the Welcome arrived.
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
        """Returns whether the loop has hung for too long; always False for an engine that reports no turns."""
        return (
            self.num_turns > 0 and 0 < self._timeout_s <= now_s - self._since_s and self._num_statuses >= _MIN_STATUSES
        )
