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

from frontend.errors import DeadlineExceeded, EngineFault, RequestError
from frontend.routing.pending import Ticket
from frontend.routing.quarantine import SUSPECT_LOSSES, Loss, Suspects
from frontend.routing.stream import CancelReason, EndReason, RequestEnd
from frontend.supervision import EngineEnd, Supervision, Unsupervised

logger = logging.getLogger(__name__)

_TRIAL_CHECK_S = 0.02
_JUDGE_S = 0.05  # between two looks for why an engine has ended; its supervisor learns that within milliseconds
_PAUSE_S = 0.25  # before a request that no engine has taken is tried again; doubles each time
_MAX_PAUSE_S = 2.0


class Mover:
    """Keeps what waits for an engine.

    Invariant: a ticket that waits has no handle in any session.

    Args:
        place: submits a ticket to an engine, unless none can take it; says whether it did.
        timeout_s: how long a request waits for an engine.
        max_moves: most losses in a row that a request survives without getting further.
        note_waiting: told how many wait, whenever that may have changed.
        supervision: knows why engines end, and whether they are about to be restarted.
    """

    def __init__(
        self,
        place: Callable[[Ticket], bool],
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
        self._suspects = Suspects(max_losses=max_moves)
        self._waiting: dict[int, Ticket] = {}  # by number
        self._some_wait_their_turn = False
        self._due_s = float("inf")  # when something has to be done, unless an engine comes; time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped: RequestError | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._waiting)

    def submit(self, ticket: Ticket, error: RequestError) -> None:
        """A new request: to an engine, or, if none is there any more, to those that wait for one."""
        if self._stopped is not None:
            raise self._stopped
        if not self._place(ticket):
            self._wait(ticket, error, was_taken=False)
            self._wake(time.monotonic())

    def lost(self, tickets: Iterable[Ticket], error: RequestError) -> None:
        """An engine is gone; `error` is what those get that nobody takes."""
        tickets = list(tickets)
        loss = self._suspects.lost(tickets)
        if tickets:
            self._unjudged.append((tickets[0].instance_id, loss))
        for ticket in tickets:
            self._wait(ticket, error, was_taken=True)
        self.retry()

    def returned(self, ticket: Ticket, error: RequestError, *, was_taken: bool, try_at_once: bool) -> None:
        """An engine has not taken it, or has given it up because it stops: for another one, or for the same one a while
        later.
        """
        self._wait(ticket, error, was_taken=was_taken)
        now_s = time.monotonic()
        if not try_at_once:
            if self._end_if_late(ticket, now_s, self._supervision.restart_until_s):
                self.drop(ticket)
                return
            pause_s = min(_PAUSE_S * 2**ticket.num_pauses, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
            ticket.num_pauses += 1
            # In steps, so that of many that are refused some are tried together.
            ticket.not_before_s = (now_s + pause_s) // _TRIAL_CHECK_S * _TRIAL_CHECK_S
        self._wake(max(ticket.not_before_s, now_s))

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether no engine has it."""
        return ticket.number in self._waiting

    def retry(self) -> None:
        """Tries all that wait, the oldest first."""
        self._stop_timer()
        now_s = time.monotonic()
        self._some_wait_their_turn = False
        self._due_s = float("inf")
        self._judge(now_s)
        restart_until_s = functools.cache(self._supervision.restart_until_s)
        for number in sorted(self._waiting):
            ticket = self._waiting[number]
            if ticket.not_before_s <= now_s:
                # Who is behind one that waits for its turn waits too: else one that goes alone might wait for ever.
                if ticket.num_losses >= SUSPECT_LOSSES and (
                    self._some_wait_their_turn or not self._suspects.may_go(ticket)
                ):
                    self._some_wait_their_turn = True
                    ticket.wait_until_s = now_s + self._timeout_s
                elif self._place(ticket):
                    del self._waiting[number]
                    continue
                else:
                    self._suspects.leave(ticket)
            if self._end_if_late(ticket, now_s, restart_until_s):
                del self._waiting[number]
            else:
                self._due_s = min(self._due_s, _due_s(ticket, now_s))
        self._note_waiting(len(self._waiting))
        self._set_timer(now_s)

    def stop(self, error: RequestError) -> None:
        """Nothing moves any more: what waits fails."""
        self._stopped = error
        waiting, self._waiting = self._waiting, {}
        for ticket in waiting.values():
            ticket.stream.fail(error)
        self._note_waiting(0)
        self._stop_timer()

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(ticket.number, None)
        self._note_waiting(len(self._waiting))

    def _wait(self, ticket: Ticket, error: RequestError, *, was_taken: bool) -> None:
        self._suspects.leave(ticket)
        ticket.stream.leave(_Waiting(self, ticket), was_taken=was_taken)
        ticket.error = error
        ticket.not_before_s = 0.0
        if was_taken:
            ticket.num_pauses = 0
            ticket.refused_by.clear()
        if was_taken or not ticket.wait_until_s:  # else it goes on waiting
            ticket.wait_until_s = time.monotonic() + self._timeout_s
        if self._stopped is not None:
            ticket.stream.fail(self._stopped)
        else:
            self._waiting[ticket.number] = ticket
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
            for ticket in self._suspects.pardon(loss) if end is EngineEnd.KILLED else loss.given_up:
                if self._waiting.pop(ticket.number, None) is not None:  # else its client has gone meanwhile
                    self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        logger.error("request %r is given up: see its error", ticket.submission.request_id)
        ticket.stream.fail(
            EngineFault(
                f"the engine was lost {ticket.num_losses} times while it computed this request, which may be the "
                "cause; it is not tried again"
            )
        )

    def _end_if_late(self, ticket: Ticket, now_s: float, restart_until_s: Callable[[], float]) -> bool:
        """Ends a request that has no time left to wait."""
        stream = ticket.stream
        if ticket.budget_end_s is not None and ticket.budget_end_s <= now_s:
            end = RequestEnd(EndReason.TIME_BUDGET, 0, ticket.num_prompt_tokens, 0, stream.num_tokens)
            stream.finish(end)
        elif ticket.deadline_at_s is not None and ticket.deadline_at_s <= now_s:
            stream.fail(DeadlineExceeded(f"the deadline passed after {stream.num_tokens} output tokens"))
        elif ticket.wait_until_s <= now_s and not self._counts_on_restart(ticket, now_s, restart_until_s()):
            assert ticket.error is not None, "it waits for a reason"
            stream.fail(ticket.error)
        return stream.closed

    def _counts_on_restart(self, ticket: Ticket, now_s: float, restart_until_s: float) -> bool:
        """Whether its timeout has not run all the time, because a restart was to be expected; it then waits longer."""
        wait_until_s = min(restart_until_s, now_s) + self._timeout_s
        if wait_until_s <= now_s:
            return False
        ticket.wait_until_s = wait_until_s
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
        if now_s >= self._due_s or (self._some_wait_their_turn and self._suspects.has_room):
            self.retry()
        else:
            self._set_timer(now_s)


class _Waiting:
    """Has the stream of a request that waits."""

    def __init__(self, mover: Mover, ticket: Ticket) -> None:
        self._mover = mover
        self._ticket = ticket

    def grant(self, handle: int, num_tokens: int) -> None:
        """Is part of what the next engine gets with the request."""

    def cancel(self, handle: int, reason: CancelReason) -> None:  # noqa: ARG002 - there is nobody to tell it to
        """Its client has gone."""
        self._mover.drop(self._ticket)


def _due_s(ticket: Ticket, now_s: float) -> float:
    """When something may have to be done for it, unless an engine comes."""
    ends_s = (ticket.wait_until_s, ticket.deadline_at_s, ticket.budget_end_s)
    due_s = min(end_s for end_s in ends_s if end_s is not None)
    return min(due_s, ticket.not_before_s) if ticket.not_before_s > now_s else due_s
