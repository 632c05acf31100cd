"""The order of the experiment: ids first, then every case in rounds in which the systems take turns."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.bench.agreement import require_equal_ids
from loadgen.experiments.batching.barrier import SPACING_S
from loadgen.experiments.batching.case_run import CaseRun
from loadgen.experiments.batching.cases import Case, Sizes, sweep_case
from loadgen.experiments.batching.model import Model
from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult
from loadgen.experiments.batching.system import EngineSize, RunTrace, System

Progress = Callable[[str], None]

_SECONDS_BEHIND_BARRIERS = 0.4
_SECONDS_PER_REQUEST = 1.5 * SPACING_S


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The sweep's case on engines with this many slots."""

    num_slots: int
    result: CaseResult


class Systems:
    """Running systems, which take turns.

    Args:
        systems: in the order of their turns.
        rounds: turns of each in a case.
        progress: gets every figure as text.
    """

    def __init__(self, systems: Sequence[System], rounds: int, progress: Progress) -> None:
        self._systems = systems
        self._rounds = rounds
        self._progress = progress
        self._seconds_per_barrier = systems[0].seconds_per_barrier()

    def check_ids(self, case: Case) -> None:
        """Runs a case once on every system, which also warms it up.

        Raises: BenchmarkError: an answer depends on the policy.
        """
        first, *others = self._systems
        expected = first.answers(case)
        for other in others:
            require_equal_ids(f"{other.name} and {first.name}", other.answers(case), expected)
        self._progress(
            f"{case.key}: the ids of all {len(expected):,} answers ({len(set(expected)):,} distinct ones, "
            f"{sum(map(len, expected)):,} tokens) are the same from every system"
        )

    def run_trace(self, case: Case) -> CaseResult:
        """Runs a case in rounds."""
        needed_s = _SECONDS_BEHIND_BARRIERS + _SECONDS_PER_REQUEST * len(case.trace)
        num_barriers = math.ceil(needed_s / self._seconds_per_barrier)
        rounds: dict[str, list[CaseRun]] = {system.name: [] for system in self._systems}
        for number in range(1, self._rounds + 1):
            for system in self._systems:
                case_run = system.run_trace(case, num_barriers)
                rounds[system.name].append(case_run)
                self._progress(
                    f"{case.key}, round {number} of {self._rounds}: {system.name} {case_run.seconds:.1f} s, "
                    f"{len(case_run.steps):,} steps"
                )
        return CaseResult(case, rounds)


@contextlib.contextmanager
def running_systems(
    size: EngineSize, names: Sequence[str], folder: Path, run_trace: RunTrace, *, rounds: int, progress: Progress
) -> Iterator[Systems]:
    """Starts systems of one size and ends them again.

    Raises: TargetError: a process does not start.
    """
    with contextlib.ExitStack() as stack:
        systems = [
            stack.enter_context(System(name, size, folder / str(index), run_trace)) for index, name in enumerate(names)
        ]
        for system in systems:  # they load at the same time
            system.wait_until_served()
        yield Systems(systems, rounds, progress)


def sweep(
    model: Model, sizes: Sizes, folder: Path, run_trace: RunTrace, *, rounds: int, progress: Progress
) -> list[SweepPoint]:
    """Runs the sweep's case on static and continuous engines of every number of slots.

    Raises: TargetError, ResultError: see `Systems`.
    """
    points = []
    for num_slots in sizes.sweep_slots:
        case = sweep_case(sizes, num_slots)
        size = EngineSize.of(model, num_slots, sizes.prompt_tokens, sizes.prompt_tokens + max(sizes.sweep))
        progress(f"sweep: engines of {num_slots} slots")
        names = (STATIC, CONTINUOUS)
        with running_systems(
            size, names, folder / str(num_slots), run_trace, rounds=rounds, progress=progress
        ) as running:
            running.check_ids(case)
            points.append(SweepPoint(num_slots, running.run_trace(case)))
    return points
