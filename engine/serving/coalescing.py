"""Tokens of several steps in one message: how long a token may wait for those of the next steps."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoalescePolicy:
    """How long tokens may wait for those of the next steps.

    With few streams, messages take a noticeable share of the time only if steps are much shorter.

    Attributes:
        max_delay_s: longest delay of a token; 0 disables coalescing.
        num_streams: fewer streams wait an eighth of that at most.
    """

    max_delay_s: float = 0.0
    num_streams: int = 8

    def delay_s(self, num_rows: int) -> float:
        """Returns the longest delay of a token while so many streams have unsent ones."""
        return self.max_delay_s if num_rows >= self.num_streams else self.max_delay_s / 8


_OF_SLACK = 0.05
"""Longest delay as a share of the time until a token is due: steps are planned to use most of that time."""


class Hold:
    """The unsent tokens of one receiver that wait for the next step; lives on the event loop.

    Args:
        policy: how long they may wait.
        release: sends them; called when no further step comes in time.
    """

    def __init__(self, policy: CoalescePolicy, release: Callable[[], None]) -> None:
        self._policy = policy
        self._release = release
        self._since_s: float | None = None  # event loop's clock: arrival of the oldest
        self._timer: asyncio.TimerHandle | None = None

    def keeps(self, *, num_rows: int, step_s: float, slack_s: float | None = None) -> bool:
        """Returns whether the tokens wait, because the next step is due within their delay.

        Args:
            num_rows: streams with unsent tokens.
            step_s: duration of the last step, the estimate for the next one.
            slack_s: least time until a running request's next token is due; None: none is.
        """
        loop = asyncio.get_running_loop()
        if self._since_s is None:
            self._since_s = loop.time()
        delay_s = self._policy.delay_s(num_rows)
        if slack_s is not None:
            delay_s = min(delay_s, _OF_SLACK * slack_s)
        if loop.time() - self._since_s + step_s >= delay_s:
            return False
        if self._timer is None:
            self._timer = loop.call_later(delay_s, self._release)
        return True

    def end(self) -> None:
        """Notes that nothing waits."""
        self._since_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
