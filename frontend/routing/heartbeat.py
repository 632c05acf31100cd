"""Whether an engine's step loop still turns, as its heartbeats tell. Pure: times of time.monotonic() in.

An engine whose device hangs goes on answering, with a heartbeat every quarter of a second: another thread sends these.
But each says how many turns the step loop has made, idle ones included.
"""

_MIN_STATUSES = 8  # two seconds of the engine's own clock: if this process is held up, the engine is not to blame


class Heartbeat:
    """The turns of one stream's engine so far.

    Args:
        timeout_s: how long the loop may stand still, which is how long a step may take; 0: for ever.
        num_turns: that the engine's welcome told.
        now_s: when it came.
    """

    def __init__(self, *, timeout_s: float, num_turns: int, now_s: float) -> None:
        self._timeout_s = timeout_s
        self.num_turns = num_turns
        self._since_s = now_s
        self._num_statuses = 0

    def note(self, num_turns: int, now_s: float) -> None:
        """Takes what a heartbeat says."""
        if num_turns != self.num_turns:
            self.num_turns, self._since_s, self._num_statuses = num_turns, now_s, 0
        self._num_statuses += 1

    def has_stopped(self, now_s: float) -> bool:
        """Whether it has stood still for too long."""
        is_told = self.num_turns > 0
        return is_told and 0 < self._timeout_s <= now_s - self._since_s and self._num_statuses >= _MIN_STATUSES
