"""Whether a call that was cancelled has run out of time, or its client has left.

Both arrive as the same cancellation, and the client's clock decides first: on the wire gRPC rounds a deadline up to
three digits, so that the server believes in up to 1 % more time than the client gave.
"""

from collections.abc import Callable

_ROUNDING = 0.01
_CLOCK_SLACK_S = 0.02


class Deadline:
    """The deadline of one call. Make it when the call arrives.

    Args:
        time_remaining_s: until the deadline, as gRPC tells it; None if there is none.
    """

    def __init__(self, time_remaining_s: Callable[[], float | None]) -> None:
        self._time_remaining_s = time_remaining_s
        self._slack_s = _CLOCK_SLACK_S + _ROUNDING * (time_remaining_s() or 0.0)

    def passed(self) -> bool:
        """Whether the client's own clock may say so by now."""
        remaining_s = self._time_remaining_s()
        return remaining_s is not None and remaining_s <= self._slack_s
