"""Time accounting of one request over all engines that serve it in turn.

Each engine reports its own part; the frontend measures the time between two engines. Pure: every `now_s` is a value of
time.monotonic().
"""

from dataclasses import replace

from frontend.types import EngineAccount, EngineTime

_NOTHING = EngineTime(queued_s=0.0, prefill_s=0.0)


class RequestClock:
    """Adds up the engines' reports, the time between engines, and the time spent waiting for the client.

    The time from a lost engine's last message to the first step on the next engine counts as moved. This includes the
    time to detect that an engine hangs, and all time at an engine that was lost before it reported anything. If it was
    the first engine, the time until its last message counts as queued.

    Attributes:
        first_token_at_s: when the first token arrived; None before.
    """

    def __init__(self) -> None:
        self.first_token_at_s: float | None = None
        self._before = _NOTHING  # at lost engines, and between engines
        self._report: EngineTime | None = None  # the current engine's latest report
        self._submitted_at_s: float | None = None  # when the current engine got the request
        self._left_at_s: float | None = (
            None  # when the last engine was lost or rejected the request; None while an engine has it
        )
        self._was_lost = False  # whether an engine was lost
        self._has_moved = False  # whether another engine took the request afterwards
        self._credit_since_s = 0.0  # since when the engine has had credit without interruption
        self._paused_since_s: float | None = None  # since when the engine has no credit, or has finished
        self._reader_busy_since_s: float | None = None  # since when the reader is sending the tokens it took
        self._client_wait_s = 0.0  # since the engine's last report

    @property
    def is_paused(self) -> bool:
        """Whether the engine waits for the reader (backpressure), or has finished."""
        return self._paused_since_s is not None

    # What happens to the request.

    def submit(self, now_s: float) -> None:
        """Notes that the request is sent to an engine."""
        if self._left_at_s is not None:
            self._before = self._with_wait(now_s - self._left_at_s)
            self._left_at_s = None
            self._has_moved = self._was_lost
        self._submitted_at_s = self._credit_since_s = now_s

    def reject(self, now_s: float) -> None:
        """Notes that no engine took the request. The wait counts as queued, unless an engine was lost before."""
        if self._left_at_s is None:
            self._left_at_s = now_s if self._submitted_at_s is None else self._submitted_at_s

    def lose(self, now_s: float, *, heard_at_s: float | None = None) -> None:
        """Notes that the request's engine was lost, or dropped the request.

        Args:
            now_s: the time.
            heard_at_s: when the engine last sent computed results; None: just now.
        """
        silent_since_s = now_s
        if heard_at_s is not None and not self.is_paused:
            silent_since_s = min(max(heard_at_s, self._credit_since_s), now_s)
        report = self._report
        if report is None:
            submitted_at_s = now_s if self._submitted_at_s is None else self._submitted_at_s
            report = EngineTime(queued_s=silent_since_s - submitted_at_s, prefill_s=0.0)
        total = self._with(replace(report, parked_s=report.parked_s + self.client_wait_s(now_s)))
        self._before = replace(total, moved_s=total.moved_s + now_s - silent_since_s)
        self._report, self._left_at_s, self._was_lost = None, now_s, True
        self._client_wait_s, self._paused_since_s = 0.0, None

    def report(self, engine_time: EngineTime) -> None:
        """Takes the current engine's time report."""
        self._report = engine_time
        self._client_wait_s, self._paused_since_s = 0.0, None

    def pause(self, now_s: float) -> None:
        """Notes that the engine's credit is used up, or that it has finished."""
        self._paused_since_s = now_s

    def resume(self, now_s: float) -> None:
        """Notes that the engine gets more credit."""
        if self._paused_since_s is not None:
            self._paused_since_s, self._credit_since_s = None, now_s

    def reader_came(self, now_s: float) -> None:
        """Notes that the reader wants more tokens."""
        self.client_wait_s(now_s)
        self._reader_busy_since_s = None

    def reader_left(self, now_s: float) -> None:
        """Notes that the reader took tokens and sends them."""
        self._reader_busy_since_s = now_s

    # The sums.

    def engine_time(self, now_s: float) -> EngineTime | None:
        """Returns the time at and between all engines so far; None if nothing is known yet."""
        if self._report is not None:
            return self._with(self._report)
        if self._left_at_s is not None:
            return self._with_wait(now_s - self._left_at_s)
        return self._before if self._has_moved else None

    def account(self, last: EngineAccount) -> EngineAccount:
        """Returns the time at and between all engines; `last` is the last engine's final report."""
        if self._before is _NOTHING:
            return last
        return EngineAccount.at_end(self._with(last), last.num_output_tokens)

    def client_wait_s(self, now_s: float) -> float:
        """Returns the time spent waiting for the reader since the engine's last report."""
        if self._paused_since_s is not None and self._reader_busy_since_s is not None:
            self._client_wait_s += max(now_s - max(self._paused_since_s, self._reader_busy_since_s), 0.0)
            self._reader_busy_since_s = now_s
        return self._client_wait_s

    def _with(self, report: EngineTime) -> EngineTime:
        before, moved = self._before, self._has_moved
        return EngineTime(
            queued_s=before.queued_s + (0.0 if moved else report.queued_s),
            prefill_s=before.prefill_s + report.prefill_s,
            parked_s=before.parked_s + report.parked_s,
            preempted_s=before.preempted_s + report.preempted_s,
            num_preemptions=before.num_preemptions + report.num_preemptions,
            moved_s=before.moved_s + (report.queued_s if moved else 0.0),
        )

    def _with_wait(self, elapsed_s: float) -> EngineTime:
        """Returns the earlier time plus time without an engine."""
        before, elapsed_s = self._before, max(elapsed_s, 0.0)
        if self._was_lost:
            return replace(before, moved_s=before.moved_s + elapsed_s)
        return replace(before, queued_s=before.queued_s + elapsed_s)
