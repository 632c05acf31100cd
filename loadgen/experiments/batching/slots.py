"""Slot occupancy: which request had which slot in which steps, derived from the rows of each step.

Pure. An engine has no numbered slots, only a number of concurrent requests. Each is given the lowest slot that is free
when it first has a row, and keeps it until the step in which it finishes or loses its cache blocks.

Invariants: no two occupancies share a slot in a step; no step has more occupancies than slots.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import ResultError
from loadgen.step_log import Step, Usage


@dataclass(frozen=True, slots=True)
class Occupancy:
    """One request on one slot.

    Attributes:
        request: the engine's number of it, ascending in the order of arrival.
        slot: from 0.
        begin, end: steps [begin, end), counted from the first of the run.
        usage: its tokens; None if it lost its slot before it had finished.
    """

    request: int
    slot: int
    begin: int
    end: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class SlotUse:
    """All occupancies of a run, ordered by begin and request."""

    num_slots: int
    num_steps: int
    occupancies: tuple[Occupancy, ...]

    @property
    def num_taken(self) -> int:
        """Slots taken, added up over the steps."""
        return sum(occupancy.end - occupancy.begin for occupancy in self.occupancies)

    @property
    def utilisation(self) -> float:
        """Share of the slots that were taken, over all steps."""
        return self.num_taken / (self.num_slots * self.num_steps)

    def lengths(self) -> list[int]:
        """Output tokens of each request, in the order of the queue."""
        answers = {s.request: s.usage.output for s in self.occupancies if s.usage is not None}
        return [answers[request] for request in sorted(answers)]

    def batches(self) -> list[list[Occupancy]]:
        """Returns the batches: a new one begins in every step before which all slots were empty."""
        batches: list[list[Occupancy]] = []
        end = 0
        for occupancy in self.occupancies:
            if occupancy.begin >= end:
                batches.append([])
            batches[-1].append(occupancy)
            end = max(end, occupancy.end)
        return batches


def assign_slots(steps: Sequence[Step], num_slots: int) -> SlotUse:
    """Assigns every request a slot.

    Args:
        steps: of a run, from one moment at which nothing ran to another.
        num_slots: of the engine (`--max-num-seqs`).
    Raises: ResultError: more requests than slots in a step, or requests that never leave (names the step).
    """
    free = list(range(num_slots))  # a heap: the lowest comes first
    taken: dict[int, tuple[int, int]] = {}  # request: slot, begin
    occupancies = []

    def leave(request: int, end: int, usage: Usage | None) -> None:
        slot, begin = taken.pop(request)
        heapq.heappush(free, slot)
        occupancies.append(Occupancy(request, slot, begin, end, usage))

    for index, step in enumerate(steps):
        for request in step.preempted:
            if request in taken:
                leave(request, index, None)
        for request in sorted(step.rows.keys() - taken.keys()):
            if not free:
                raise ResultError(f"step {index} has requests {sorted({*taken, request})} on {num_slots} slots")
            taken[request] = heapq.heappop(free), index
        for request, usage in step.finished.items():
            if request in taken:
                leave(request, index + 1, usage)
    if taken:
        raise ResultError(f"the step log ends after step {len(steps) - 1} while requests {sorted(taken)} are running")
    return SlotUse(num_slots, len(steps), tuple(sorted(occupancies, key=lambda s: (s.begin, s.request))))


def padded_tokens(batch: Sequence[Occupancy]) -> int:
    """Tokens that a padded batch computes: every prompt padded to the longest, every row kept until the longest
    answer is there. The last token of an answer is sampled but never computed.
    """
    known = [occupancy.usage for occupancy in batch if occupancy.usage is not None]
    if not known:
        return 0
    return len(known) * (max(usage.prompt for usage in known) + max(usage.output for usage in known) - 1)
