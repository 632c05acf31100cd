"""The order of the experiment: ids first, then every case in rounds in which the contestants take turns."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.experiments.batching.barrier import SPACING_S
from loadgen.experiments.batching.case_run import Playing
from loadgen.experiments.batching.cases import Case, Sizes, sweep_case
from loadgen.experiments.batching.ids import require_equal_answers
from loadgen.experiments.batching.model import Model
from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult
from loadgen.experiments.batching.system import Contestant, EngineSize, Play

Progress = Callable[[str], None]

_SECONDS_BEHIND_GATES = 0.4
_SECONDS_PER_REQUEST = 1.5 * SPACING_S


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The sweep's case on engines of so many seats."""

    num_seats: int
    result: CaseResult


class Contest:
    """Contestants that are running, and turns.

    Args:
        contestants: in the order of their turns.
        rounds: turns of each in a case.
        progress: told every figure.
    """

    def __init__(self, contestants: Sequence[Contestant], rounds: int, progress: Progress) -> None:
        self._contestants = contestants
        self._rounds = rounds
        self._progress = progress
        self._seconds_per_gate = contestants[0].seconds_per_gate()

    def check_ids(self, case: Case) -> None:
        """Every contestant answers a case once; it warms up on the way.

        Raises: ResultError: an answer depends on the policy.
        """
        first, *others = self._contestants
        expected = first.answers(case)
        for other in others:
            require_equal_answers(other.name, other.answers(case), first.name, expected)
        self._progress(
            f"{case.key}: the ids of all {len(expected):,} answers ({len(set(expected)):,} distinct ones, "
            f"{sum(map(len, expected)):,} tokens) are the same from every contestant"
        )

    def play(self, case: Case) -> CaseResult:
        """Plays a case in rounds."""
        needed_s = _SECONDS_BEHIND_GATES + _SECONDS_PER_REQUEST * len(case.trace)
        num_gates = math.ceil(needed_s / self._seconds_per_gate)
        rounds: dict[str, list[Playing]] = {contestant.name: [] for contestant in self._contestants}
        for number in range(1, self._rounds + 1):
            for contestant in self._contestants:
                playing = contestant.play(case, num_gates)
                rounds[contestant.name].append(playing)
                self._progress(
                    f"{case.key}, round {number} of {self._rounds}: {contestant.name} {playing.seconds:.1f} s, "
                    f"{len(playing.steps):,} steps"
                )
        return CaseResult(case, rounds)


@contextlib.contextmanager
def contest(
    size: EngineSize, names: Sequence[str], folder: Path, play: Play, *, rounds: int, progress: Progress
) -> Iterator[Contest]:
    """Starts contestants of one size and ends them again.

    Raises: TargetError: a process does not start.
    """
    with contextlib.ExitStack() as stack:
        contestants = [
            stack.enter_context(Contestant(name, size, folder / str(index), play)) for index, name in enumerate(names)
        ]
        for contestant in contestants:  # they load at the same time
            contestant.wait_until_served()
        yield Contest(contestants, rounds, progress)


def sweep(model: Model, sizes: Sizes, folder: Path, play: Play, *, rounds: int, progress: Progress) -> list[SweepPoint]:
    """Plays the sweep's case on static and continuous engines of every number of seats.

    Raises: TargetError, ResultError: see `Contest`.
    """
    points = []
    for num_seats in sizes.sweep_seats:
        case = sweep_case(sizes, num_seats)
        size = EngineSize.of(model, num_seats, sizes.prompt_tokens, sizes.prompt_tokens + max(sizes.sweep))
        progress(f"sweep: engines of {num_seats} seats")
        names = (STATIC, CONTINUOUS)
        with contest(size, names, folder / str(num_seats), play, rounds=rounds, progress=progress) as running:
            running.check_ids(case)
            points.append(SweepPoint(num_seats, running.play(case)))
    return points
