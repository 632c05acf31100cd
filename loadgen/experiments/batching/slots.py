"""Who sat where, and when: requests on the seats of a batch, from the steps in which they had rows.

Pure. An engine has no numbered seats, only so many requests at once. Each is given the lowest seat that is free when it
first has a row, and keeps it until the step in which it finishes or loses its cache blocks.

Invariants: no two sittings share a seat in a step; no step has more sittings than seats.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import ResultError
from loadgen.experiments.batching.step_log import Step, Usage


@dataclass(frozen=True, slots=True)
class Sitting:
    """One request on one seat.

    Attributes:
        request: the engine's number of it, ascending in the order of arrival.
        seat: from 0.
        begin, end: steps [begin, end), counted from the first of the run.
        usage: its tokens; None if it lost its seat before it had finished.
    """

    request: int
    seat: int
    begin: int
    end: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Seating:
    """All sittings of a run, by begin, then by request."""

    num_seats: int
    num_steps: int
    sittings: tuple[Sitting, ...]

    @property
    def num_taken(self) -> int:
        """Seats taken, added up over the steps."""
        return sum(sitting.end - sitting.begin for sitting in self.sittings)

    @property
    def utilisation(self) -> float:
        """Share of the seats that were taken, over all steps."""
        return self.num_taken / (self.num_seats * self.num_steps)

    def lengths(self) -> list[int]:
        """Output tokens of each request, in the order of the queue."""
        answers = {s.request: s.usage.output for s in self.sittings if s.usage is not None}
        return [answers[request] for request in sorted(answers)]

    def batches(self) -> list[list[Sitting]]:
        """Sittings that belong together: a new batch begins in every step before which all seats were empty."""
        batches: list[list[Sitting]] = []
        end = 0
        for sitting in self.sittings:
            if sitting.begin >= end:
                batches.append([])
            batches[-1].append(sitting)
            end = max(end, sitting.end)
        return batches


def seat_requests(steps: Sequence[Step], num_seats: int) -> Seating:
    """Gives every request a seat.

    Args:
        steps: of a run, from one moment at which nothing ran to another.
        num_seats: of the engine (`--max-num-seqs`).
    Raises: ResultError: more requests than seats in a step, or requests that never leave (names the step).
    """
    free = list(range(num_seats))  # a heap: the lowest comes first
    taken: dict[int, tuple[int, int]] = {}  # request: seat, begin
    sittings = []

    def leave(request: int, end: int, usage: Usage | None) -> None:
        seat, begin = taken.pop(request)
        heapq.heappush(free, seat)
        sittings.append(Sitting(request, seat, begin, end, usage))

    for index, step in enumerate(steps):
        for request in step.preempted:
            if request in taken:
                leave(request, index, None)
        for request in sorted(step.rows.keys() - taken.keys()):
            if not free:
                raise ResultError(f"step {index} has requests {sorted({*taken, request})} on {num_seats} seats")
            taken[request] = heapq.heappop(free), index
        for request, usage in step.finished.items():
            if request in taken:
                leave(request, index + 1, usage)
    if taken:
        raise ResultError(f"the step log ends after step {len(steps) - 1} while requests {sorted(taken)} are running")
    return Seating(num_seats, len(steps), tuple(sorted(sittings, key=lambda s: (s.begin, s.request))))


def padded_tokens(batch: Sequence[Sitting]) -> int:
    """What a batch without ragged rows computes: every prompt padded to the longest, every row kept until the longest
    answer is there. The last token of an answer is sampled but never computed.
    """
    known = [sitting.usage for sitting in batch if sitting.usage is not None]
    if not known:
        return 0
    return len(known) * (max(usage.prompt for usage in known) + max(usage.output for usage in known) - 1)
