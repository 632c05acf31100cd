"""The time account of a request over all engines that have had it. Each tells only its own part, and only now and then;
the time between two of them is nobody's but ours. Pure: times of time.monotonic() in.
"""

from dataclasses import replace

from frontend.types import EngineAccount, EngineTime

_NOTHING = EngineTime(queued_s=0.0, prefill_s=0.0)


class EngineTimes:
    """What has been told and measured so far.

    Up to the first step on the next engine all time since the lost one fell silent counts as moved, also what it took
    to notice that it hangs. So does all the time with an engine that took the request over and was lost too before it
    said anything of it; if it was the first one that said nothing, the time until it fell silent was spent in queues,
    as far as anybody knows.
    """

    def __init__(self) -> None:
        self._before = _NOTHING  # with the engines that are gone, and between them
        self._now: EngineTime | None = None  # with the one that has it
        self._began_at_s: float | None = None  # when that one got it
        self._left_at_s: float | None = None  # the last one, if none has it
        self._was_lost = False  # at least once
        self._has_moved = False

    def submit(self, now_s: float) -> None:
        """It goes to an engine."""
        if self._left_at_s is not None:
            self._before = self._with_wait(now_s - self._left_at_s)
            self._left_at_s = None
            self._has_moved = self._was_lost
        self._began_at_s = now_s

    def tell(self, time: EngineTime) -> None:
        """The engine's account so far."""
        self._now = time

    def lose(self, now_s: float, *, silent_since_s: float, parked_s: float) -> None:
        """The engine is gone, or has given it up.

        Args:
            now_s: monotonic seconds.
            silent_since_s: when there was work for the engine and nothing came of it any more; now, if it never was so.
            parked_s: time without credit that the engine has not told any more, none of it since then.
        """
        told = self._now
        began_at_s = now_s if self._began_at_s is None else self._began_at_s
        silent_since_s = min(max(silent_since_s, began_at_s), now_s)
        if told is None:
            told = EngineTime(queued_s=silent_since_s - began_at_s, prefill_s=0.0)
        told = self._with(replace(told, parked_s=told.parked_s + parked_s))
        self._before = replace(told, moved_s=told.moved_s + now_s - silent_since_s)
        self._now, self._left_at_s, self._was_lost = None, now_s, True

    def refuse(self, now_s: float) -> None:
        """The engine has not taken it, or there was none: that is time in queues, unless it was lost before."""
        if self._left_at_s is None:
            self._left_at_s = now_s if self._began_at_s is None else self._began_at_s

    def so_far(self, now_s: float) -> EngineTime | None:
        """All of it; None as long as nothing is known."""
        if self._now is not None:
            return self._with(self._now)
        if self._left_at_s is not None:
            return self._with_wait(now_s - self._left_at_s)
        return self._before if self._has_moved else None

    def account(self, last: EngineAccount) -> EngineAccount:
        """All of it, with the last engine's own account at the end."""
        if self._before is _NOTHING:
            return last
        return EngineAccount.at_end(self._with(last), last.num_output_tokens)

    def _with(self, told: EngineTime) -> EngineTime:
        before, moved = self._before, self._has_moved
        return EngineTime(
            queued_s=before.queued_s + (0.0 if moved else told.queued_s),
            prefill_s=before.prefill_s + told.prefill_s,
            parked_s=before.parked_s + told.parked_s,
            preempted_s=before.preempted_s + told.preempted_s,
            num_preemptions=before.num_preemptions + told.num_preemptions,
            moved_s=before.moved_s + (told.queued_s if moved else 0.0),
        )

    def _with_wait(self, elapsed_s: float) -> EngineTime:
        """What was before, and so much time with no engine."""
        before, elapsed_s = self._before, max(elapsed_s, 0.0)
        if self._was_lost:
            return replace(before, moved_s=before.moved_s + elapsed_s)
        return replace(before, queued_s=before.queued_s + elapsed_s)
