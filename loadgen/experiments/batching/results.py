"""Result of a case, and its table.

Pure. Figures are those of each system's fastest round; ratios are static over continuous, so that above 1 means
more under static batching: more steps, more time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.experiments.batching.case_run import CaseRun
from loadgen.experiments.batching.cases import Case
from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.simulation import rows_of_steps

if TYPE_CHECKING:
    from loadgen.experiments.batching.case_run import Floats

STEP_TOLERANCE = 0.05
"""The ratio of steps and that of the simulated steps may differ by this share."""


class Spread(NamedTuple):
    """A ratio: of the best rounds, and the least and greatest of one round."""

    best: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All rounds of a case.

    Attributes:
        case: what was run.
        rounds: per system, what came out of each round, in order.
    """

    case: Case
    rounds: Mapping[str, Sequence[CaseRun]]

    def best(self, name: str) -> CaseRun:
        """The fastest round of a system."""
        return min(self.rounds[name], key=lambda case_run: case_run.seconds)

    def ratio(self, figure: Callable[[CaseRun], float]) -> float:
        """Static over continuous."""
        return figure(self.best(STATIC)) / figure(self.best(CONTINUOUS))

    def time_ratio(self, name: str = STATIC, other: str = CONTINUOUS) -> Spread:
        """Wall-clock seconds of one system over those of another."""
        pairs = zip(self.rounds[name], self.rounds[other], strict=True)
        of_rounds = [one.seconds / two.seconds for one, two in pairs]
        return Spread(self.best(name).seconds / self.best(other).seconds, min(of_rounds), max(of_rounds))

    def simulated_steps(self, name: str) -> int:
        """Steps of slots alone with the same answers in the order in which the engine had them in its queue."""
        slot_use = self.best(name).slot_use
        return len(rows_of_steps(slot_use.lengths(), slot_use.num_slots, static=name == STATIC))

    @property
    def step_ratio(self) -> float:
        """Steps of static over continuous."""
        return self.ratio(lambda case_run: len(case_run.steps))

    @property
    def simulated_step_ratio(self) -> float:
        """The same of the slots alone."""
        return self.simulated_steps(STATIC) / self.simulated_steps(CONTINUOUS)

    @property
    def agrees_with_simulation(self) -> bool:
        """Whether the engine saves the steps it should."""
        return abs(self.step_ratio / self.simulated_step_ratio - 1) <= STEP_TOLERANCE


class Row(NamedTuple):
    """One line of a case's table.

    Attributes:
        label: with the unit.
        values: per system, in the order of `CaseResult.rounds`, as text.
        ratio: static over continuous, as text; "" where there is none.
        note: what else to know.
    """

    label: str
    values: tuple[str, ...]
    ratio: str = ""
    note: str = ""


def table(result: CaseResult) -> list[Row]:
    """The figures of a case, one line each."""

    def row(label: str, figure: Callable[[CaseRun], float], form: str, note: str = "") -> Row:
        values = tuple(format(figure(result.best(name)), form) for name in result.rounds)
        return Row(label, values, f"{result.ratio(figure):.2f}", note)

    time = result.time_ratio()
    rows = [
        row("slots in use, %", lambda case_run: 100 * case_run.slot_use.utilisation, ".1f"),
        row("rows in a step, mean", lambda case_run: float(case_run.steps.rows.mean()), ".1f"),
        row("steps", lambda case_run: len(case_run.steps), ",d", _simulation_note(result)),
        _padding_row(result),
        row("ms of a step, mean", lambda case_run: 1e3 * case_run.seconds / len(case_run.steps), ".2f"),
        row("cores for frontend and load generator", lambda case_run: case_run.client_cores, ".2f"),
        row("seconds", lambda case_run: case_run.seconds, ".2f", f"{time.low:.2f}..{time.high:.2f} in single rounds"),
        row("output tokens/s", lambda case_run: case_run.tokens_per_s, ",.0f", _spread_note(result)),
    ]
    rows += [
        row(f"{label}, p{percentile}, ms", percentile_of(pick, percentile), ",.2f")
        for label, pick in LATENCIES.items()
        for percentile in (50, 99)
    ]
    cached = tuple(f"{100 * result.best(name).cached_share:.0f}" for name in result.rounds)
    rows.append(Row("prompt tokens from the prefix cache, %", cached))
    rows += _counts("preemptions", [result.best(name).num_preemptions for name in result.rounds])
    rows += _counts(
        "answers at another place of the queue", [result.best(name).num_misplaced for name in result.rounds]
    )
    return rows


def _counts(label: str, counts: Sequence[int]) -> list[Row]:
    """What should not happen, and is left out where it did not."""
    return [Row(label, tuple(f"{count:,}" for count in counts))] if any(counts) else []


def percentile_of(pick: Callable[[CaseRun], "Floats"], percentile: float) -> Callable[[CaseRun], float]:
    """The figure that is a percentile of values."""
    return lambda case_run: float(np.percentile(pick(case_run), percentile))


LATENCIES: Mapping[str, Callable[[CaseRun], "Floats"]] = {
    "TTFT": lambda case_run: case_run.latencies.ttft,
    "normalized latency": lambda case_run: case_run.latencies.normalized,
    "TPOT": lambda case_run: case_run.latencies.tpot,
}
"""Names in reports, and where the values are."""


def _simulation_note(result: CaseResult) -> str:
    if not result.case.is_queued:
        return "arrivals decide how full the steps are"
    off = 100 * (result.step_ratio / result.simulated_step_ratio - 1)
    verdict = "" if result.agrees_with_simulation else f": MORE THAN {100 * STEP_TOLERANCE:.0f} %"
    return (
        f"slots alone: {result.simulated_steps(STATIC):,} / {result.simulated_steps(CONTINUOUS):,} = "
        f"{result.simulated_step_ratio:.2f}, off by {off:+.1f} %{verdict}"
    )


def _padding_row(result: CaseResult) -> Row:
    padded = result.best(STATIC).padding_ratio
    values = tuple(f"{padded:.2f}" if name == STATIC else "-" for name in result.rounds)
    return Row(
        "tokens, padded over computed", values, note="if every batch were padded to its longest prompt and answer"
    )


def _spread_note(result: CaseResult) -> str:
    spreads = []
    for name in result.rounds:
        speeds = [case_run.tokens_per_s for case_run in result.rounds[name]]
        spreads.append(f"{min(speeds):,.0f}..{max(speeds):,.0f}")
    return "rounds: " + ", ".join(spreads)
