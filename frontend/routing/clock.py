"""Times of one request over all engines that have it in turn: what they report, and what the frontend measures.

An engine reports only its own part, now and then; the time between two engines is measured here. Pure: every `now_s` is
a value of time.monotonic().
"""

from dataclasses import replace

from frontend.types import EngineAccount, EngineTime

_NOTHING = EngineTime(queued_s=0.0, prefill_s=0.0)


class RequestClock:
    """Adds up the engines' reports, the time between engines, and the time spent waiting for the client.

    From the moment that a lost engine fell silent to the first step on the next engine, all time counts as moved. That
    includes the time to notice that an engine hangs, and all time with a later engine that was lost before it reported
    anything. If the first engine was lost before it reported anything, its time until it fell silent counts as queued.

    Attributes:
        first_token_at_s: when the first token arrived; None: none has.
    """

    def __init__(self) -> None:
        self.first_token_at_s: float | None = None
        self._before = _NOTHING  # with engines that are lost, and between engines
        self._report: EngineTime | None = None  # the latest one of the current engine
        self._submitted_at_s: float | None = None  # to the current engine
        self._left_at_s: float | None = None  # when the last engine was lost or rejected it; None: an engine has it
        self._was_lost = False  # at least once
        self._has_moved = False  # and an engine has it again
        self._credit_since_s = 0.0  # the engine has had credit since then without a break
        self._paused_since_s: float | None = None  # the engine has no credit, or is done
        self._reader_busy_since_s: float | None = None  # the reader is busy with what it has taken
        self._client_wait_s = 0.0  # since the engine's last report

    @property
    def is_paused(self) -> bool:
        """Whether the engine can do nothing until the reader takes more (backpressure), or is done."""
        return self._paused_since_s is not None

    # What happens to the request.

    def submit(self, now_s: float) -> None:
        """It is sent to an engine."""
        if self._left_at_s is not None:
            self._before = self._with_wait(now_s - self._left_at_s)
            self._left_at_s = None
            self._has_moved = self._was_lost
        self._submitted_at_s = self._credit_since_s = now_s

    def reject(self, now_s: float) -> None:
        """No engine has taken it. The wait counts as queued, unless an engine was lost before."""
        if self._left_at_s is None:
            self._left_at_s = now_s if self._submitted_at_s is None else self._submitted_at_s

    def lose(self, now_s: float, *, heard_at_s: float | None = None) -> None:
        """Its engine is lost, or has dropped it.

        Args:
            now_s: the time.
            heard_at_s: when the engine last sent anything it had computed; None: it has not been silent.
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
        """Takes the current engine's report of its time so far."""
        self._report = engine_time
        self._client_wait_s, self._paused_since_s = 0.0, None

    def pause(self, now_s: float) -> None:
        """The engine's credit is used up, or the engine is done."""
        self._paused_since_s = now_s

    def resume(self, now_s: float) -> None:
        """The engine gets more credit."""
        if self._paused_since_s is not None:
            self._paused_since_s, self._credit_since_s = None, now_s

    def reader_came(self, now_s: float) -> None:
        """The reader comes for more."""
        self.client_wait_s(now_s)
        self._reader_busy_since_s = None

    def reader_left(self, now_s: float) -> None:
        """The reader has got something and is busy with it."""
        self._reader_busy_since_s = now_s

    # The sums.

    def engine_time(self, now_s: float) -> EngineTime | None:
        """The time in and between all engines so far; None: nothing is known yet."""
        if self._report is not None:
            return self._with(self._report)
        if self._left_at_s is not None:
            return self._with_wait(now_s - self._left_at_s)
        return self._before if self._has_moved else None

    def account(self, last: EngineAccount) -> EngineAccount:
        """The time in and between all engines, where `last` is the last engine's final report."""
        if self._before is _NOTHING:
            return last
        return EngineAccount.at_end(self._with(last), last.num_output_tokens)

    def client_wait_s(self, now_s: float) -> float:
        """Time spent waiting for the reader, as far as the engine has not reported it."""
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
        """Adds time without an engine to the time before."""
        before, elapsed_s = self._before, max(elapsed_s, 0.0)
        if self._was_lost:
            return replace(before, moved_s=before.moved_s + elapsed_s)
        return replace(before, queued_s=before.queued_s + elapsed_s)
