"""Poison-request quarantine: isolates requests that are suspected of crashing engines. Pure.

A request is quarantined after QUARANTINE_LOSSES engines in a row were lost while they computed it and its answer made
no progress. Quarantined requests are admitted a few at a time, "on trial", so that the next loss shows the cause:

- One is admitted first, and one more for each that makes progress, as in TCP's slow start. Many harmless requests, for
  example of two engines that were killed at once, are therefore cleared quickly.
- If an engine is lost with several requests on trial, each of them is then tried alone.
- If an engine is lost with one request on trial, the loss counts for that request and for new requests beside it, which
  may be the cause as well. The request then survives two more losses, until the new ones are quarantined too.

A loss with a request on trial counts for no other request, so a poison request fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from frontend.routing.pending import PendingRequest

QUARANTINE_LOSSES = 2
"""Losses in a row that quarantine a request. One is not enough, because engines are also killed from outside."""

CLEARED_TOKENS = 8
"""Tokens that an answer must gain after a loss to clear its request. Steps in flight are lost with an engine, so the
first tokens prove nothing.
"""

MAX_KILLS = 32
"""Kills from outside that a request survives without progress. Further ones count as losses, because a memory watcher
in user space may have killed the engine due to the request.
"""

_MAX_WIDTH = 64  # bounds the cost: every admission checks all requests on trial


@dataclass(slots=True)
class _Record:
    """History of one request.

    Attributes:
        num_losses: engines lost in a row without progress.
        num_kills: of these, engines that were killed from outside.
        is_isolated: whether it is tried alone, because it was lost together with others on trial.
        tokens_at_loss: number of output tokens at the last loss.
    """

    num_losses: int = 0
    num_kills: int = 0
    is_isolated: bool = False
    tokens_at_loss: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """The effect of one lost engine.

    Attributes:
        condemned: requests that must not be tried again.
        before: each request's earlier number of losses and isolation, to undo the loss.
    """

    condemned: list[PendingRequest] = field(default_factory=list)
    before: list[tuple[PendingRequest, int, bool]] = field(default_factory=list)


class Quarantine:
    """Counts losses, and decides which requests may be sent to an engine.

    Invariant: every request on trial has an engine or has ended; at most `_width` are on trial at once.

    Args:
        max_losses: maximum losses in a row that a request survives.
    """

    def __init__(self, *, max_losses: int) -> None:
        self._max_losses = max_losses
        self._records: WeakKeyDictionary[PendingRequest, _Record] = WeakKeyDictionary()
        self._on_trial: dict[PendingRequest, None] = {}  # in order of admission
        self._width = 1

    @property
    def has_capacity(self) -> bool:
        """Whether one more quarantined request may be admitted now."""
        return len(self._active()) < self._width

    def num_losses(self, request: PendingRequest) -> int:
        """Returns the number of engines that a request lost in a row without progress."""
        return self._record(request).num_losses

    def is_quarantined(self, request: PendingRequest) -> bool:
        """Returns whether the request may be the cause of crashes."""
        return self.num_losses(request) >= QUARANTINE_LOSSES

    def admit(self, request: PendingRequest) -> bool:
        """Returns whether this quarantined request may be sent to an engine now; it is then on trial."""
        active = self._active()
        is_isolated = any(self._record(one).is_isolated for one in (request, *active))
        if len(active) >= (1 if is_isolated else self._width):
            return False
        self._on_trial[request] = None
        return True

    def release(self, request: PendingRequest) -> None:
        """Ends the trial of a request that has no engine."""
        self._on_trial.pop(request, None)

    def lost(self, requests: Sequence[PendingRequest]) -> Loss:
        """Counts the loss of an engine with these open requests."""
        on_trial = set(self._active()) & set(requests)
        max_losses = self._max_losses
        if on_trial and any(_is_new(request) and request not in on_trial for request in requests):
            max_losses += QUARANTINE_LOSSES  # until the new ones are quarantined too: one of them may be the cause
        loss = Loss()
        for request in requests:
            record = self._records.setdefault(request, _Record())
            if self._is_cleared(request):
                record.num_losses, record.is_isolated, record.num_kills = 0, False, 0
            loss.before.append((request, record.num_losses, record.is_isolated))
            if len(on_trial) > 1 and request in on_trial:
                record.is_isolated = True
            elif request.stream.clock.is_paused:
                pass  # paused by backpressure: it was in no step, so it cannot be the cause
            elif not on_trial or request in on_trial or _is_new(request):
                record.num_losses += 1
                if record.num_losses > max_losses and on_trial <= {request}:
                    loss.condemned.append(request)
            record.tokens_at_loss = request.stream.num_tokens
            self.release(request)
        if on_trial or not self._on_trial:
            self._width = 1
        return loss

    def excuse(self, loss: Loss) -> list[PendingRequest]:
        """Undoes a loss, because the engine was killed from outside.

        Returns: requests that must not be tried again nevertheless, after more than `MAX_KILLS` kills.
        """
        condemned = []
        for request, num_losses, is_isolated in loss.before:
            record = self._record(request)
            record.num_kills += 1
            if record.num_kills <= MAX_KILLS:
                record.num_losses, record.is_isolated = num_losses, is_isolated
            elif request in loss.condemned:
                condemned.append(request)
        return condemned

    def _active(self) -> list[PendingRequest]:
        """Returns the requests on trial that have not ended, are not cleared, and are not paused by backpressure."""
        done = [request for request in self._on_trial if request.stream.closed or self._is_cleared(request)]
        for request in done:
            self.release(request)
        self._width = min(self._width + len(done), _MAX_WIDTH)
        return [request for request in self._on_trial if not request.stream.clock.is_paused]

    def _record(self, request: PendingRequest) -> _Record:
        return self._records.get(request) or _Record()

    def _is_cleared(self, request: PendingRequest) -> bool:
        return request.stream.num_tokens - self._record(request).tokens_at_loss >= CLEARED_TOKENS


def _is_new(request: PendingRequest) -> bool:
    return request.stream.num_tokens < CLEARED_TOKENS
