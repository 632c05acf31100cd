"""Alternating whole runs, so that one series yields several figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Settings
from chairlift.bench.run import Run


@dataclass(frozen=True, slots=True)
class Rounds:
    """One run per variant and measured round, in order."""

    runs: Mapping[str, tuple[Run, ...]]

    def samples(self, figure: Callable[[Run], float], names: Sequence[str] | None = None) -> Samples:
        """Returns one figure of every run; less is better.

        Args:
            figure: computes the figure of a run.
            names: variants to include; None is all.
        """
        chosen = self.runs if names is None else names
        return Samples({name: tuple(figure(run) for run in self.runs[name]) for name in chosen})

    def raw_steps(self) -> dict[str, object]:
        """Returns tokens, rows and seconds of every step, for a report."""
        return {
            name: [[(step.num_tokens, step.num_rows, step.seconds) for step in run.steps] for run in runs]
            for name, runs in self.runs.items()
        }


def alternate_runs(variants: Mapping[str, Callable[[], Run]], settings: Settings) -> Rounds:
    """Runs all variants once per round, after a warm-up round.

    Raises: BenchmarkError: the answers of a variant differ between rounds.
    """
    runs: dict[str, list[Run]] = {name: [] for name in variants}

    def variant(name: str) -> Callable[[], float]:
        def measure() -> float:
            run = variants[name]()
            runs[name].append(run)
            require_equal_ids(f"two rounds of {name}", run.output_ids, runs[name][0].output_ids)
            return run.wall_s

        return measure

    alternate({name: variant(name) for name in variants}, rounds=settings.rounds, progress=settings.progress)
    return Rounds({name: tuple(all_runs[-settings.rounds :]) for name, all_runs in runs.items()})
