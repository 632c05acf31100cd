"""Failover queue: holds requests without an engine until an engine takes them or they time out.

Requests are tried when they are queued and whenever an engine becomes available, oldest first. A request waits up to a
timeout, but not beyond its own deadline or time budget. The timeout does not run while a supervisor is about to restart
an engine. Suspected poison requests also wait for their trial (`quarantine.py`); that wait does not count.
"""

import asyncio
import functools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from chairlift.service.end_reason import EndReason
from frontend.errors import DeadlineExceeded, EngineFault, RequestError
from frontend.routing.pending import PendingRequest
from frontend.routing.quarantine import Loss, Quarantine
from frontend.routing.stream import RequestEnd
from frontend.routing.supervision import EngineEnd, SupervisorNotes

logger = logging.getLogger(__name__)

_TRIAL_CHECK_S = 0.02
_JUDGE_S = 0.05  # between two checks why an engine ended; its supervisor knows within milliseconds
_PAUSE_S = 0.25  # before a request that all engines rejected is tried again; doubles each time
_MAX_PAUSE_S = 2.0


@dataclass(slots=True)
class _Waiting:
    """A request in the queue.

    Attributes:
        error: the request's error if no engine takes it in time.
        not_before_s: time.monotonic() of the next attempt.
    """

    request: PendingRequest
    error: RequestError
    not_before_s: float = 0.0


@dataclass(slots=True)
class _Backoff:
    """A request's attempts to find an engine. Kept until an engine took the request and was lost.

    Attributes:
        wait_until_s: time.monotonic() when the request times out.
        pause_s: longest pause before the next attempt if all engines reject it.
    """

    wait_until_s: float
    pause_s: float = _PAUSE_S


class FailoverQueue:
    """Holds the requests that wait for an engine.

    Invariant: a request in the queue is open in no session.

    Args:
        place: submits a request to an engine if one can take it; returns whether it did.
        timeout_s: how long a request waits for an engine.
        max_moves: maximum losses in a row that a request survives without progress.
        on_waiting: called with the length of the queue when it may have changed.
        supervision: reads why engines ended, and whether they will be restarted.
    """

    def __init__(
        self,
        place: Callable[[PendingRequest], bool],
        *,
        timeout_s: float,
        max_moves: int,
        on_waiting: Callable[[int], None],
        supervision: SupervisorNotes,
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._on_waiting = on_waiting
        self._supervision = supervision
        self._unjudged: list[tuple[str, Loss]] = []  # losses with an unknown cause, with the instance id
        self._quarantine = Quarantine(max_losses=max_moves)
        self._waiting: dict[int, _Waiting] = {}  # by number
        self._backoffs: WeakKeyDictionary[PendingRequest, _Backoff] = WeakKeyDictionary()
        self._has_blocked_trial = False
        self._due_s = float("inf")  # time.monotonic() of the next timed event
        self._timer: asyncio.TimerHandle | None = None
        self._stop_error: RequestError | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    def is_waiting(self, request: PendingRequest) -> bool:
        """Returns whether the request is in the queue."""
        return request.number in self._waiting

    def add(self, request: PendingRequest, error: RequestError) -> None:
        """Queues a new request without an engine; it fails with `error` if it times out."""
        self._wait(request, error, was_taken=False)
        self._wake(time.monotonic())

    def add_lost(
        self,
        instance_id: str,
        requests: Sequence[PendingRequest],
        error: RequestError,
        *,
        heard_at_s: float | None = None,
    ) -> None:
        """Queues the requests of a lost engine, and tries to place them at once.

        Args:
            instance_id: the engine's instance id.
            requests: its open requests, at least one.
            error: the error of requests that time out.
            heard_at_s: time.monotonic() when the engine last sent computed results.
        """
        self._unjudged.append((instance_id, self._quarantine.lost(requests)))
        for request in requests:
            self._wait(request, error, was_taken=True, heard_at_s=heard_at_s)
        self.retry()

    def add_rejected(self, request: PendingRequest, error: RequestError, *, was_taken: bool, try_at_once: bool) -> None:
        """Queues a request that an engine rejected, or dropped because it stops (`was_taken`).

        It is tried again at once with another engine, or after a pause with any engine.
        """
        self._wait(request, error, was_taken=was_taken)
        now_s = due_s = time.monotonic()
        if not try_at_once and self._stop_error is None:
            if self._end_if_late(self._waiting[request.number], now_s, self._supervision.restart_until_s):
                self.drop(request)
                return
            backoff = self._backoffs[request]
            pause_s = backoff.pause_s * random.uniform(0.5, 1.0)
            backoff.pause_s = min(2 * backoff.pause_s, _MAX_PAUSE_S)
            # Rounded down, so that many rejected requests are retried together.
            due_s = (now_s + pause_s) // _TRIAL_CHECK_S * _TRIAL_CHECK_S
            self._waiting[request.number].not_before_s = due_s
        self._wake(max(due_s, now_s))

    def retry(self) -> None:
        """Tries to place all waiting requests, the oldest first."""
        self._stop_timer()
        now_s = time.monotonic()
        self._has_blocked_trial = False
        self._due_s = float("inf")
        self._judge(now_s)
        restart_until_s = functools.cache(self._supervision.restart_until_s)
        for number in sorted(self._waiting):
            waiting = self._waiting[number]
            request = waiting.request
            if waiting.not_before_s <= now_s:
                # A blocked request blocks the quarantined ones behind it; otherwise an isolated one might never start.
                if self._quarantine.is_quarantined(request) and (
                    self._has_blocked_trial or not self._quarantine.admit(request)
                ):
                    self._has_blocked_trial = True
                    self._backoffs[request].wait_until_s = now_s + self._timeout_s
                elif self._place(request):
                    del self._waiting[number]
                    continue
                else:
                    self._quarantine.release(request)
            if self._end_if_late(waiting, now_s, restart_until_s):
                del self._waiting[number]
            else:
                self._due_s = min(self._due_s, self._next_event_s(waiting, now_s))
        self._on_waiting(len(self._waiting))
        self._set_timer(now_s)

    def drop(self, request: PendingRequest) -> None:
        """Removes a request that was cancelled."""
        self._waiting.pop(request.number, None)
        self._on_waiting(len(self._waiting))

    def stop(self, error: RequestError) -> None:
        """Fails all requests in the queue, and all later ones."""
        self._stop_error = error
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            one.request.stream.fail(error)
        self._on_waiting(0)
        self._stop_timer()

    def _wait(
        self, request: PendingRequest, error: RequestError, *, was_taken: bool, heard_at_s: float | None = None
    ) -> None:
        self._quarantine.release(request)
        request.detach(lambda _: self.drop(request), was_taken=was_taken, heard_at_s=heard_at_s)
        if was_taken or request not in self._backoffs:  # otherwise its wait continues
            self._backoffs[request] = _Backoff(time.monotonic() + self._timeout_s)
        if self._stop_error is not None:
            request.stream.fail(self._stop_error)
        else:
            self._waiting[request.number] = _Waiting(request, error)
            self._on_waiting(len(self._waiting))

    def _judge(self, now_s: float) -> None:
        """Fails suspected poison requests once it is known why their engine ended."""
        unjudged, self._unjudged = self._unjudged, []
        for instance_id, loss in unjudged:
            end = self._supervision.end_of(instance_id)
            if end is None:
                self._unjudged.append((instance_id, loss))
                self._due_s = min(self._due_s, now_s + _JUDGE_S)
                continue
            for request in self._quarantine.excuse(loss) if end is EngineEnd.KILLED else loss.condemned:
                if self._waiting.pop(request.number, None) is not None:  # otherwise it was cancelled
                    self._fail_poison_request(request)

    def _fail_poison_request(self, request: PendingRequest) -> None:
        num_losses = self._quarantine.num_losses(request)
        logger.error(
            "request %r failed after %d lost engines in a row: it is suspected of crashing them and is not tried again",
            request.submission.request_id,
            num_losses,
        )
        request.stream.fail(
            EngineFault(
                f"the engine was lost {num_losses} times while it computed this request, which may be the cause; it is "
                "not tried again"
            )
        )

    def _end_if_late(self, waiting: _Waiting, now_s: float, restart_until_s: Callable[[], float]) -> bool:
        """Ends a request whose time is over; returns whether it has ended."""
        request, stream = waiting.request, waiting.request.stream
        if request.budget_end_s is not None and request.budget_end_s <= now_s:
            stream.finish(RequestEnd(EndReason.TIME_BUDGET, 0, request.num_prompt_tokens, 0, stream.num_tokens))
        elif request.deadline_at_s is not None and request.deadline_at_s <= now_s:
            stream.fail(DeadlineExceeded(f"the deadline passed after {stream.num_tokens} output tokens"))
        elif self._backoffs[request].wait_until_s <= now_s:
            # The timeout does not run while a restart is expected.
            wait_until_s = min(restart_until_s(), now_s) + self._timeout_s
            if wait_until_s > now_s:
                self._backoffs[request].wait_until_s = wait_until_s
            else:
                stream.fail(waiting.error)
        return stream.closed

    def _next_event_s(self, waiting: _Waiting, now_s: float) -> float:
        """Returns the time of the next timed event of a request."""
        request = waiting.request
        ends_s = (self._backoffs[request].wait_until_s, request.deadline_at_s, request.budget_end_s)
        due_s = min(end_s for end_s in ends_s if end_s is not None)
        return min(due_s, waiting.not_before_s) if waiting.not_before_s > now_s else due_s

    # The timer.

    def _wake(self, due_s: float) -> None:
        """Sets the timer, which is shared by all requests, to this time at the latest."""
        self._due_s = min(self._due_s, due_s)
        self._set_timer(time.monotonic())

    def _set_timer(self, now_s: float) -> None:
        self._stop_timer()
        if self._waiting:
            due_s = min(self._due_s, now_s + _TRIAL_CHECK_S) if self._has_blocked_trial else self._due_s
            self._timer = asyncio.get_running_loop().call_later(max(due_s - now_s, 0.0), self._tick)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s or (self._has_blocked_trial and self._quarantine.has_capacity):
            self.retry()
        else:
            self._set_timer(now_s)
