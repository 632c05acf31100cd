"""Passes the step loop's reports to the event loop, those of several short steps together.

On a CPU, a small model's step is shorter than what its report costs in three processes. While one stream runs, tokens
that are sent one by one take most of the two cores that also compute; while many run, a fifth to a third.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.outputs import RequestOutput
from engine.interfaces import AdmissionReport, CacheReport, Report, StepReport


@dataclass(frozen=True, slots=True)
class CoalescePolicy:
    """How long tokens may wait for those of the next steps.

    On two slow cores a message costs a lone stream about a millisecond: with one every 25 ms, 4 % of its time. Where
    steps take longer, few tokens would share a message, and few streams keep their even pace.

    Attributes:
        max_delay_s: longest delay of a token; 0 disables coalescing.
        num_streams: fewer streams wait only for steps shorter than 0.2 of that.
    """

    max_delay_s: float = 0.0
    num_streams: int = 8

    def delay_s(self, num_rows: int, step_s: float) -> float:
        """Returns the longest delay of a token.

        Args:
            num_rows: streams with tokens.
            step_s: duration of a step.
        """
        return self.max_delay_s if num_rows >= self.num_streams or step_s < 0.2 * self.max_delay_s else 0.0


_OF_SLACK = 0.05
"""Longest delay as a share of the time until a token is due: steps are planned to use most of that time."""


class ReportOutbox:
    """Reports on their way to the event loop, in order.

    `put` and `flush` belong to the step loop's thread. A report that must not wait takes all before it along.

    Args:
        call: calls a function on the event loop soon, in the order of the calls.
        deliver: gets each report there.
        policy: how long tokens may wait.
        clock: seconds.
    """

    def __init__(
        self,
        call: Callable[..., object],
        deliver: Callable[[Report], None],
        policy: CoalescePolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._deliver = deliver
        self._policy = policy
        self._clock = clock
        self._reports: deque[Report] = deque()
        self._due_s: float | None = None  # when the timer sends what has come since the last flush
        self._timer: asyncio.TimerHandle | None = None  # of the event loop's thread

    def put(self, report: Report) -> None:
        """Sends a report, or holds it for a later one that is expected within its delay."""
        self._reports.append(report)
        step_s = report.snapshot.step_us / 1e6 if isinstance(report, StepReport) else 0.0  # the estimate for the next
        delay_s = self._delay_s(report, step_s)
        now_s = self._clock()
        due_s = now_s + delay_s
        if self._due_s is not None:
            due_s = min(due_s, self._due_s)  # past if the timer has fired: then this one goes at once
        if now_s + step_s >= due_s:
            self.flush()
        elif due_s != self._due_s:
            self._due_s = due_s
            self._call(self._drain_after, due_s - now_s)

    def flush(self) -> None:
        """Sends all that waits."""
        self._due_s = None
        self._call(self._drain)

    def _delay_s(self, report: Report, step_s: float) -> float:
        match report:
            case CacheReport() | AdmissionReport(rejected=()):
                return self._policy.delay_s(0, step_s)
            case StepReport() if not any(map(_is_urgent, report.outputs)):
                delay_s = self._policy.delay_s(len(report.outputs), step_s)
                slack_s = report.snapshot.stats.min_slack_s
                return delay_s if slack_s is None else min(delay_s, _OF_SLACK * slack_s)
            case _:
                return 0.0

    def _drain_after(self, delay_s: float) -> None:
        # What was put before a flush has gone by then, and the timer with it: calls keep their order. Otherwise this
        # timer is the earlier one.
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._call, self._drain)

    def _drain(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._reports:
            self._deliver(self._reports.popleft())


def _is_urgent(output: RequestOutput) -> bool:
    return output.time is not None or output.completion is not None or output.prompt_logprobs is not None
