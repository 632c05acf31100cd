"""Whole runs in turn, so that one alternating series yields several figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Settings
from chairlift.bench.run import Run


@dataclass(frozen=True, slots=True)
class Rounds:
    """Per contestant one run per round that counts, in order."""

    runs: Mapping[str, tuple[Run, ...]]

    def samples(self, figure: Callable[[Run], float], names: Sequence[str] | None = None) -> Samples:
        """One figure of every run; less is better.

        Args:
            figure: of one run.
            names: the contestants that have it; None is all.
        """
        chosen = self.runs if names is None else names
        return Samples({name: tuple(figure(run) for run in self.runs[name]) for name in chosen})

    def raw_steps(self) -> dict[str, object]:
        """Tokens, rows and seconds of every step, as a report holds them."""
        return {
            name: [[(step.num_tokens, step.num_rows, step.seconds) for step in run.steps] for run in runs]
            for name, runs in self.runs.items()
        }


def alternate_runs(contestants: Mapping[str, Callable[[], Run]], settings: Settings) -> Rounds:
    """Runs all contestants once per round, after a round that does not count.

    Raises: BenchmarkError: a contestant does not answer alike in every round.
    """
    runs: dict[str, list[Run]] = {name: [] for name in contestants}

    def contestant(name: str) -> Callable[[], float]:
        def measure() -> float:
            run = contestants[name]()
            runs[name].append(run)
            require_equal_ids(f"two rounds of {name}", run.output_ids, runs[name][0].output_ids)
            return run.wall_s

        return measure

    alternate({name: contestant(name) for name in contestants}, rounds=settings.rounds, progress=settings.progress)
    return Rounds({name: tuple(all_runs[-settings.rounds :]) for name, all_runs in runs.items()})
