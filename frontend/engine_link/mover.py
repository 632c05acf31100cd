"""Requests whose engine is gone, until another one has them, or the same one again, or it is too late.

All of them are tried at once, the oldest first, when they come and whenever an engine has come. What no engine takes
waits up to a timeout, and no longer than its own deadline and time budget.

A request may be what kills engines. One whose engines were lost several times in a row, without its answer getting any
further, is a suspect: suspects go on one at a time, so that the next loss tells. The one that was on trial then is the
cause, as far as anybody knows; to the others there that loss does not count. So what kills fails alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from frontend.engine_link.request_stream import CancelReason, EndReason, RequestEnd
from frontend.engine_link.ticket import Ticket
from frontend.errors import DeadlineExceeded, EngineFault, RequestError

logger = logging.getLogger(__name__)

SUSPECT_LOSSES = 2
"""In a row. The first one makes nobody suspect: engines are killed from outside too."""

CLEARED_TOKENS = 8
"""So many tokens further than at the last loss, a request has shown that it was not the cause: steps in flight when an
engine dies are lost, so the very next tokens show nothing.
"""

_TRIAL_CHECK_S = 0.02
_PAUSE_S = 0.25  # before a request that has not been taken is tried again


class Mover:
    """Keeps what waits for an engine.

    Invariants: a ticket that waits has no handle in any session; at most one suspect is with an engine.

    Args:
        place: submits a ticket to an engine, unless none can take it; says whether it did.
        timeout_s: how long a request waits for an engine.
        max_moves: most losses in a row that a request survives without getting further.
    """

    def __init__(self, place: Callable[[Ticket], bool], *, timeout_s: float, max_moves: int) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._max_moves = max_moves
        self._waiting: dict[int, Ticket] = {}  # by number
        self._on_trial: Ticket | None = None
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
            self._wait(ticket, error)
            self.retry()

    def lost(self, tickets: Iterable[Ticket], error: RequestError) -> None:
        """An engine is gone, or has given these up; `error` is what those get that nobody takes."""
        tickets = list(tickets)
        culprit = self._on_trial if self._on_trial in tickets and not self._trial_is_over() else None
        for ticket in tickets:
            if _is_cleared(ticket):
                ticket.num_losses = 0
            if culprit in (None, ticket):
                ticket.num_losses += 1
            ticket.lost_at_index = ticket.stream.num_tokens
            if ticket.num_losses > self._max_moves:
                self._give_up(ticket)
            else:
                self._wait(ticket, error)
        self.retry()

    def returned(self, ticket: Ticket, error: RequestError) -> None:
        """An engine has not taken it: for another one, or for the same one a while later."""
        self._wait(ticket, error)
        ticket.num_returns += 1
        if ticket.num_returns > 1:
            ticket.not_before_s = time.monotonic() + _PAUSE_S
        self.retry()

    def is_waiting(self, ticket: Ticket) -> bool:
        """Whether no engine has it."""
        return ticket.number in self._waiting

    def retry(self) -> None:
        """Tries all that wait, the oldest first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now_s = time.monotonic()
        for number in sorted(self._waiting):
            ticket = self._waiting[number]
            if ticket.not_before_s <= now_s and self._may_go(ticket):
                if self._place(ticket):
                    del self._waiting[number]
                elif ticket is self._on_trial:
                    self._on_trial = None
            if number in self._waiting and self._end_if_late(ticket, now_s):
                del self._waiting[number]
        self._set_timer(now_s)

    def stop(self, error: RequestError) -> None:
        """Nothing moves any more: what waits fails."""
        self._stopped = error
        waiting, self._waiting = self._waiting, {}
        for ticket in waiting.values():
            ticket.stream.fail(error)
        if self._timer is not None:
            self._timer.cancel()

    def drop(self, ticket: Ticket) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(ticket.number, None)

    def _wait(self, ticket: Ticket, error: RequestError) -> None:
        if ticket is self._on_trial:
            self._on_trial = None
        ticket.stream.lose(_Waiting(self, ticket))
        ticket.error = error
        ticket.not_before_s = 0.0
        ticket.wait_until_s = time.monotonic() + self._timeout_s
        if self._stopped is not None:
            ticket.stream.fail(self._stopped)
        else:
            self._waiting[ticket.number] = ticket

    def _may_go(self, ticket: Ticket) -> bool:
        if ticket.num_losses < SUSPECT_LOSSES:
            return True
        if self._on_trial is not None and not self._trial_is_over():
            return False
        self._on_trial = ticket
        return True

    def _trial_is_over(self) -> bool:
        ticket = self._on_trial
        return ticket is None or ticket.stream.closed or _is_cleared(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        logger.error("request %s is given up: see its error", ticket.submission.request_id)
        ticket.stream.fail(
            EngineFault(
                f"the engine was lost {ticket.num_losses} times while it computed this request, which may be the "
                "cause; it is not tried again"
            )
        )

    def _end_if_late(self, ticket: Ticket, now_s: float) -> bool:
        """Ends a request that has no time left to wait."""
        stream = ticket.stream
        if ticket.budget_end_s is not None and ticket.budget_end_s <= now_s:
            end = RequestEnd(EndReason.TIME_BUDGET, 0, ticket.num_prompt_tokens, 0, stream.num_tokens)
            stream.finish(end)
        elif ticket.deadline_at_s is not None and ticket.deadline_at_s <= now_s:
            stream.fail(DeadlineExceeded(f"the deadline passed after {stream.num_tokens} output tokens"))
        elif ticket.wait_until_s <= now_s:
            assert ticket.error is not None, "it waits for a reason"
            stream.fail(ticket.error)
        return stream.closed

    def _set_timer(self, now_s: float) -> None:
        if not self._waiting:
            return
        due_s = min(_due_s(ticket, now_s) for ticket in self._waiting.values())
        if self._on_trial is not None and not self._trial_is_over():
            due_s = min(due_s, now_s + _TRIAL_CHECK_S)
        self._timer = asyncio.get_running_loop().call_later(due_s - now_s, self.retry)


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


def _is_cleared(ticket: Ticket) -> bool:
    return ticket.stream.num_tokens - ticket.lost_at_index >= CLEARED_TOKENS


def _due_s(ticket: Ticket, now_s: float) -> float:
    """When something may have to be done for it, unless an engine comes."""
    ends_s = (ticket.wait_until_s, ticket.deadline_at_s, ticket.budget_end_s)
    due_s = min(end_s for end_s in ends_s if end_s is not None)
    return min(due_s, ticket.not_before_s) if ticket.not_before_s > now_s else due_s
