"""Requests whose engine is gone, until another one has them, or the same one again, or it is too late.

All of them are tried at once, the oldest first, when they come and whenever an engine has come. What no engine takes
waits up to a timeout, and no longer than its own deadline and time budget. The timeout does not run while a supervisor
is about to restart an engine. Those that may be what kills engines wait
for their turn as well (`quarantine.py`), which does not count as waiting for an engine.
"""

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Iterable

from chairlift.service.end_reason import EndReason
from frontend.errors import DeadlineExceeded, EngineFault, RequestError
from frontend.routing.pending import PendingRequest
from frontend.routing.quarantine import SUSPECT_LOSSES, Loss, Quarantine
from frontend.routing.stream import CancelReason, RequestEnd
from frontend.routing.supervision import EngineEnd, Supervision, Unsupervised

logger = logging.getLogger(__name__)

_TRIAL_CHECK_S = 0.02
_JUDGE_S = 0.05  # between two looks for why an engine has ended; its supervisor learns that within milliseconds
_PAUSE_S = 0.25  # before a request that no engine has taken is tried again; doubles each time
_MAX_PAUSE_S = 2.0


class FailoverQueue:
    """Keeps what waits for an engine.

    Invariant: a pending that waits has no handle in any session.

    Args:
        place: submits a pending to an engine, unless none can take it; says whether it did.
        timeout_s: how long a request waits for an engine.
        max_moves: most losses in a row that a request survives without getting further.
        note_waiting: told how many wait, whenever that may have changed.
        supervision: knows why engines end, and whether they are about to be restarted.
    """

    def __init__(
        self,
        place: Callable[[PendingRequest], bool],
        *,
        timeout_s: float,
        max_moves: int,
        note_waiting: Callable[[int], None],
        supervision: Supervision | None = None,
    ) -> None:
        self._place = place
        self._supervision = supervision or Unsupervised()
        self._unjudged: list[tuple[str, Loss]] = []  # by instance id: it is not known yet why it has ended
        self._note_waiting = note_waiting
        self._timeout_s = timeout_s
        self._quarantine = Quarantine(max_losses=max_moves)
        self._waiting: dict[int, PendingRequest] = {}  # by number
        self._some_wait_their_turn = False
        self._due_s = float("inf")  # when something has to be done, unless an engine comes; time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: RequestError | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._waiting)

    def submit(self, pending: PendingRequest, error: RequestError) -> None:
        """A new request: to an engine, or, if none is there any more, to those that wait for one."""
        if self._stopped is not None:
            raise self._stopped
        if not self._place(pending):
            self._wait(pending, error, was_taken=False)
            self._wake(time.monotonic())

    def lost(self, requests: Iterable[PendingRequest], error: RequestError) -> None:
        """An engine is gone; `error` is what those get that nobody takes."""
        requests = list(requests)
        loss = self._quarantine.lost(requests)
        if requests:
            self._unjudged.append((requests[0].instance_id, loss))
        for pending in requests:
            self._wait(pending, error, was_taken=True)
        self.retry()

    def returned(self, pending: PendingRequest, error: RequestError, *, was_taken: bool, try_at_once: bool) -> None:
        """An engine has not taken it, or has given it up because it stops: for another one, or for the same one a while
        later.
        """
        self._wait(pending, error, was_taken=was_taken)
        now_s = time.monotonic()
        if not try_at_once:
            if self._end_if_late(pending, now_s, self._supervision.restart_until_s):
                self.drop(pending)
                return
            pause_s = min(_PAUSE_S * 2**pending.num_pauses, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
            pending.num_pauses += 1
            # In steps, so that of many that are refused some are tried together.
            pending.not_before_s = (now_s + pause_s) // _TRIAL_CHECK_S * _TRIAL_CHECK_S
        self._wake(max(pending.not_before_s, now_s))

    def is_waiting(self, pending: PendingRequest) -> bool:
        """Whether no engine has it."""
        return pending.number in self._waiting

    def retry(self) -> None:
        """Tries all that wait, the oldest first."""
        self._stop_timer()
        now_s = time.monotonic()
        self._some_wait_their_turn = False
        self._due_s = float("inf")
        self._judge(now_s)
        restart_until_s = functools.cache(self._supervision.restart_until_s)
        for number in sorted(self._waiting):
            pending = self._waiting[number]
            if pending.not_before_s <= now_s:
                # Who is behind one that waits for its turn waits too: else one that goes alone might wait for ever.
                if pending.num_losses >= SUSPECT_LOSSES and (
                    self._some_wait_their_turn or not self._quarantine.may_go(pending)
                ):
                    self._some_wait_their_turn = True
                    pending.wait_until_s = now_s + self._timeout_s
                elif self._place(pending):
                    del self._waiting[number]
                    continue
                else:
                    self._quarantine.leave(pending)
            if self._end_if_late(pending, now_s, restart_until_s):
                del self._waiting[number]
            else:
                self._due_s = min(self._due_s, _due_s(pending, now_s))
        self._note_waiting(len(self._waiting))
        self._set_timer(now_s)

    def stop(self, error: RequestError) -> None:
        """Nothing moves any more: what waits fails."""
        self._stopped = error
        waiting, self._waiting = self._waiting, {}
        for pending in waiting.values():
            pending.stream.fail(error)
        self._note_waiting(0)
        self._stop_timer()

    def drop(self, pending: PendingRequest) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(pending.number, None)
        self._note_waiting(len(self._waiting))

    def _wait(self, pending: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        self._quarantine.leave(pending)
        pending.stream.leave(_Waiting(self, pending), was_taken=was_taken)
        pending.error = error
        pending.not_before_s = 0.0
        if was_taken:
            pending.num_pauses = 0
            pending.refused_by.clear()
        if was_taken or not pending.wait_until_s:  # else it goes on waiting
            pending.wait_until_s = time.monotonic() + self._timeout_s
        if self._stopped is not None:
            pending.stream.fail(self._stopped)
        else:
            self._waiting[pending.number] = pending
            self._note_waiting(len(self._waiting))

    def _judge(self, now_s: float) -> None:
        """Gives up requests that may be what kills engines, once it is known why theirs ended."""
        unjudged, self._unjudged = self._unjudged, []
        for instance_id, loss in unjudged:
            end = self._supervision.end_of(instance_id)
            if end is None:
                self._unjudged.append((instance_id, loss))
                self._due_s = min(self._due_s, now_s + _JUDGE_S)
                continue
            for pending in self._quarantine.pardon(loss) if end is EngineEnd.KILLED else loss.given_up:
                if self._waiting.pop(pending.number, None) is not None:  # else its client has gone meanwhile
                    self._give_up(pending)

    def _give_up(self, pending: PendingRequest) -> None:
        logger.error("request %r is given up: see its error", pending.submission.request_id)
        pending.stream.fail(
            EngineFault(
                f"the engine was lost {pending.num_losses} times while it computed this request, which may be the "
                "cause; it is not tried again"
            )
        )

    def _end_if_late(self, pending: PendingRequest, now_s: float, restart_until_s: Callable[[], float]) -> bool:
        """Ends a request that has no time left to wait."""
        stream = pending.stream
        if pending.budget_end_s is not None and pending.budget_end_s <= now_s:
            end = RequestEnd(EndReason.TIME_BUDGET, 0, pending.num_prompt_tokens, 0, stream.num_tokens)
            stream.finish(end)
        elif pending.deadline_at_s is not None and pending.deadline_at_s <= now_s:
            stream.fail(DeadlineExceeded(f"the deadline passed after {stream.num_tokens} output tokens"))
        elif pending.wait_until_s <= now_s and not self._counts_on_restart(pending, now_s, restart_until_s()):
            assert pending.error is not None, "it waits for a reason"
            stream.fail(pending.error)
        return stream.closed

    def _counts_on_restart(self, pending: PendingRequest, now_s: float, restart_until_s: float) -> bool:
        """Whether its timeout has not run all the time, because a restart was to be expected; it then waits longer."""
        wait_until_s = min(restart_until_s, now_s) + self._timeout_s
        if wait_until_s <= now_s:
            return False
        pending.wait_until_s = wait_until_s
        return True

    # The timer.

    def _wake(self, due_s: float) -> None:
        """Sees to it that everything is tried at that time, once for all that ask for it."""
        self._due_s = min(self._due_s, due_s)
        self._set_timer(time.monotonic())

    def _set_timer(self, now_s: float) -> None:
        self._stop_timer()
        if self._waiting:
            due_s = min(self._due_s, now_s + _TRIAL_CHECK_S) if self._some_wait_their_turn else self._due_s
            self._timer = asyncio.get_running_loop().call_later(max(due_s - now_s, 0.0), self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s or (self._some_wait_their_turn and self._quarantine.has_room):
            self.retry()
        else:
            self._set_timer(now_s)


class _Waiting:
    """Has the stream of a request that waits."""

    def __init__(self, failover: FailoverQueue, pending: PendingRequest) -> None:
        self._failover = failover
        self._ticket = pending

    def grant(self, handle: int, num_tokens: int) -> None:
        """Is part of what the next engine gets with the request."""

    def cancel(self, handle: int, reason: CancelReason) -> None:  # noqa: ARG002 - there is nobody to tell it to
        """Its client has gone."""
        self._failover.drop(self._ticket)


def _due_s(pending: PendingRequest, now_s: float) -> float:
    """When something may have to be done for it, unless an engine comes."""
    ends_s = (pending.wait_until_s, pending.deadline_at_s, pending.budget_end_s)
    due_s = min(end_s for end_s in ends_s if end_s is not None)
    return min(due_s, pending.not_before_s) if pending.not_before_s > now_s else due_s
