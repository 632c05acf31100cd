"""Poison-request quarantine: isolates requests that are suspected of crashing engines. Pure.

A request is a suspect when several engines in a row were lost under it and its answer got no further. Suspects are
admitted a few at a time, so that the next loss tells: first one, and one more for each that gets further, as in TCP's
slow start; so many innocent suspects, of two engines that were killed at once, are through in a moment. If an engine is
lost with several suspects on trial, each of them is tried alone after that. A suspect that is alone on trial counts as
the cause; but a new request beside it may be the cause as well, and has two more losses to become a suspect itself. A
loss with a suspect on trial counts for no other request. So a poison request fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from frontend.routing.pending import PendingRequest

SUSPECT_LOSSES = 2
"""Losses in a row that make a suspect. The first one does not: engines are killed from outside, too."""

CLEARED_TOKENS = 8
"""Tokens that an answer must grow after a loss to clear its request. Steps in flight when an engine dies are lost, so
the very next tokens prove nothing.
"""

MAX_KILLS = 32
"""Kills from outside that a request survives without getting further. More count as losses: a memory watcher in user
space may be what kills, and the request the reason.
"""

_MAX_WIDTH = 64  # each suspect on trial is checked whenever another one asks


@dataclass(slots=True)
class _Record:
    """What is known of one request.

    Attributes:
        num_losses: engines lost in a row without progress.
        num_kills: engines in a row that were killed from outside, likewise.
        is_isolated: it was lost together with other suspects on trial, so it is tried alone.
        tokens_at_loss: tokens that had arrived at the last loss.
    """

    num_losses: int = 0
    num_kills: int = 0
    is_isolated: bool = False
    tokens_at_loss: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """What one loss of an engine has changed.

    Attributes:
        condemned: requests that must not be tried again.
        before: losses and isolation of each request as they were before, to take the loss back.
    """

    condemned: list[PendingRequest] = field(default_factory=list)
    before: list[tuple[PendingRequest, int, bool]] = field(default_factory=list)


class Quarantine:
    """Counts losses, and decides which requests may go to an engine.

    Invariant: every request on trial has an engine or has ended; at most `_width` of them were admitted at once.

    Args:
        max_losses: most losses in a row that a request survives.
    """

    def __init__(self, *, max_losses: int) -> None:
        self._max_losses = max_losses
        self._records: WeakKeyDictionary[PendingRequest, _Record] = WeakKeyDictionary()
        self._on_trial: dict[PendingRequest, None] = {}  # in order of admission
        self._width = 1

    @property
    def has_capacity(self) -> bool:
        """Whether one more suspect may be admitted now."""
        return len(self._active()) < self._width

    def num_losses(self, request: PendingRequest) -> int:
        """Engines that were lost in a row under a request, without progress."""
        return self._record(request).num_losses

    def is_suspect(self, request: PendingRequest) -> bool:
        """Whether the request may be what crashes engines."""
        return self.num_losses(request) >= SUSPECT_LOSSES

    def admit(self, request: PendingRequest) -> bool:
        """Whether this suspect may go to an engine now. If so, it is on trial from then on."""
        active = self._active()
        is_isolated = any(self._record(one).is_isolated for one in (request, *active))
        if len(active) >= (1 if is_isolated else self._width):
            return False
        self._on_trial[request] = None
        return True

    def release(self, request: PendingRequest) -> None:
        """The request has no engine any more, or has not got one."""
        self._on_trial.pop(request, None)

    def lost(self, requests: Sequence[PendingRequest]) -> Loss:
        """Counts the loss of the engine that had all of these requests."""
        on_trial = set(self._active()) & set(requests)
        max_losses = self._max_losses
        if on_trial and any(_is_new(request) and request not in on_trial for request in requests):
            max_losses += SUSPECT_LOSSES  # until the new ones are suspects too, if one of them is the cause
        loss = Loss()
        for request in requests:
            record = self._records.setdefault(request, _Record())
            if self._is_cleared(request):
                record.num_losses, record.is_isolated, record.num_kills = 0, False, 0
            loss.before.append((request, record.num_losses, record.is_isolated))
            if len(on_trial) > 1 and request in on_trial:
                record.is_isolated = True
            elif request.stream.clock.is_paused:
                pass  # paused on backpressure, so it was in no step and cannot be the cause
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
        """Takes back what a loss has counted: the engine was killed from outside.

        Returns: requests that must not be tried again all the same, after more than `MAX_KILLS` kills.
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
        """The requests whose trial goes on: others have ended, are cleared, or are paused on backpressure."""
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
