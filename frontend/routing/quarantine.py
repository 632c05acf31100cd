"""Who may be what kills engines, and how to find out. Pure.

A request whose engines were lost several times in a row, without its answer getting any further, is a suspect. Suspects
go on few at a time, so that the next loss tells: first one, and one more for each that gets further, as TCP's slow
start opens its window; so that many innocent ones, of two engines that were killed at once, are through in a moment.
If an engine is lost where several are on trial, each of them goes on alone after that. One that is alone on trial is
the cause, as far as anybody knows; but a new request there may be it as well, and gets two more chances to become a
suspect itself. Losses under a trial count for no others. So what kills fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.routing.pending import PendingRequest

SUSPECT_LOSSES = 2
"""In a row. The first one makes nobody suspect: engines are killed from outside too."""

CLEARED_TOKENS = 8
"""So many tokens further than at the last loss, a request has shown that it was not the cause: steps in flight when an
engine dies are lost, so the very next tokens show nothing.
"""

MAX_KILLS = 32
"""Kills from outside that a request survives without getting further. More count as losses: what kills may be a watcher
of memory in user space, and the request its reason.
"""

_MAX_WIDTH = 64  # each is looked at whenever one of them may go


@dataclass(frozen=True, slots=True)
class Loss:
    """What one loss of an engine has changed.

    Attributes:
        given_up: requests that must not be tried again.
        counts: what was known of each request before: losses, and whether it goes alone.
    """

    given_up: list[PendingRequest]
    counts: list[tuple[PendingRequest, int, bool]]


class Quarantine:
    """Counts losses, and says who may go on.

    Invariant: whoever is on trial is with an engine or has ended; of those no more than `_width` were let go at once.

    Args:
        max_losses: most losses in a row that a request survives.
    """

    def __init__(self, *, max_losses: int) -> None:
        self._max_losses = max_losses
        self._on_trial: dict[int, PendingRequest] = {}  # by number
        self._width = 1

    @property
    def has_room(self) -> bool:
        """Whether one more may go on, as things stand now."""
        return len(self._active()) < self._width

    def may_go(self, pending: PendingRequest) -> bool:
        """Whether it may go to an engine now. A suspect that may is on trial from then on."""
        if pending.num_losses < SUSPECT_LOSSES:
            return True
        active = self._active()
        width = 1 if any(one.goes_alone for one in (pending, *active)) else self._width
        if len(active) >= width:
            return False
        self._on_trial[pending.number] = pending
        return True

    def leave(self, pending: PendingRequest) -> None:
        """It is not with an engine any more, or has not come to one."""
        self._on_trial.pop(pending.number, None)

    def lost(self, requests: Sequence[PendingRequest]) -> Loss:
        """The engine of all of these is gone."""
        there = {pending.number for pending in requests}
        culprits = {pending.number for pending in self._active() if pending.number in there}
        max_losses = self._max_losses
        if culprits and any(_is_new(pending) and pending.number not in culprits for pending in requests):
            max_losses += SUSPECT_LOSSES  # until the new ones are suspects too, if it was one of them
        given_up, counts = [], []
        for pending in requests:
            if _is_cleared(pending):
                pending.num_losses, pending.goes_alone, pending.num_kills = 0, False, 0
            counts.append((pending, pending.num_losses, pending.goes_alone))
            if len(culprits) > 1 and pending.number in culprits:
                pending.goes_alone = True
            elif pending.stream.is_parked:
                pass  # it waited for its reader: nothing of it was in any step
            elif not culprits or pending.number in culprits or _is_new(pending):
                pending.num_losses += 1
                if pending.num_losses > max_losses and culprits <= {pending.number}:
                    given_up.append(pending)
            pending.lost_at_index = pending.stream.num_tokens
            self.leave(pending)
        if culprits or not self._on_trial:
            self._width = 1
        return Loss(given_up, counts)

    def pardon(self, loss: Loss) -> list[PendingRequest]:
        """The engine was killed from outside: takes back what the loss has counted.

        Returns: requests that must not be tried again all the same: they have seen more than `MAX_KILLS`.
        """
        given_up = []
        for pending, num_losses, goes_alone in loss.counts:
            pending.num_kills += 1
            if pending.num_kills <= MAX_KILLS:
                pending.num_losses, pending.goes_alone = num_losses, goes_alone
            elif pending in loss.given_up:
                given_up.append(pending)
        return given_up

    def _active(self) -> list[PendingRequest]:
        """Those whose trial goes on: that of the others has ended, or pauses."""
        done = [pending for pending in self._on_trial.values() if pending.stream.closed or _is_cleared(pending)]
        for pending in done:
            self.leave(pending)
        self._width = min(self._width + len(done), _MAX_WIDTH)
        return [pending for pending in self._on_trial.values() if not pending.stream.is_parked]


def _is_new(pending: PendingRequest) -> bool:
    return pending.stream.num_tokens < CLEARED_TOKENS


def _is_cleared(pending: PendingRequest) -> bool:
    return pending.stream.num_tokens - pending.lost_at_index >= CLEARED_TOKENS
