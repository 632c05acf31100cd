"""The figures of a real run beside those of its twin, by service class. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadgen.measure.class_goodput import ClassGoodput
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData, Status
from loadgen.report.figures import number, share
from loadgen.simulation.results import ClassResult, Replay, SimulationResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

PERCENTILES = (50.0, 90.0, 99.0)
_AT_ONCE = "the first token would come after"  # of the frontend's refusals

MIN_SAMPLES = 20
"""Percentiles of fewer samples are shown, but not judged."""


class Figure(NamedTuple):
    """One figure of a class: milliseconds, or a share of the offered requests.

    Attributes:
        service_class: its name.
        name: such as "TTFT p50".
        real, twin: values; NaN without a sample.
        is_judged: whether there are enough samples for an error to mean something.
    """

    service_class: str
    name: str
    real: float
    twin: float
    is_judged: bool

    @property
    def error(self) -> float:
        """Of the twin, relative to the real figure."""
        return self.twin / self.real - 1.0 if self.real else math.nan


class Counts(NamedTuple):
    """Requests of a class by what became of them: met their targets, late, refused, failed or unfinished."""

    met: int
    late: int
    refused: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadComparison:
    """One load.

    Attributes:
        load: multiple of the capacity.
        real, twin: counts by class.
        retries: of the real run, (came back when told, met their targets then) by class.
        figures: percentiles by class.
        refusal_ms: [refused] float64, from the last call of a request to its refusal by the frontend as it came.
        given_up_ms: [refused] float64, the same of requests that an engine gave up later.
        samples: by side and class, TTFT and ITL in ms.
    """

    load: float
    real: dict[str, Counts]
    twin: dict[str, Counts]
    retries: dict[str, tuple[int, int]]
    figures: tuple[Figure, ...]
    refusal_ms: "NDArray[np.float64]"
    given_up_ms: "NDArray[np.float64]"
    samples: dict[str, dict[str, dict[str, list[float]]]]

    def raw(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "real": {name: counts._asdict() for name, counts in self.real.items()},
            "twin": {name: counts._asdict() for name, counts in self.twin.items()},
            "retries": self.retries,
            "refusal_ms": self.refusal_ms.tolist(),
            "given_up_ms": self.given_up_ms.tolist(),
            "samples": self.samples,
        }


def compared(load: float, run: RunData, simulated: tuple[SimulationResult, Replay]) -> LoadComparison:
    """Compares a run with its twin.

    Args:
        load: multiple of the capacity.
        run: with classes.
        simulated: the same requests.
    """
    result, replay = simulated
    samples = samples_of(run)
    real = measure(run, MeasureOptions(percentiles=PERCENTILES), samples).whole.classes
    figures: list[Figure] = []
    for own, other in zip(real, result.classes, strict=True):
        figures += _figures(own, other)
    refused = run.requests["status"] == Status.REFUSED
    refusal_ms = (samples.e2e_status - samples.client_wait)[refused]
    at_once = np.array([_AT_ONCE in run.errors[number] for number in run.requests["error"][refused]], dtype=np.bool_)
    by_class: dict[str, dict[str, dict[str, list[float]]]] = {"real": {}, "twin": {}}
    for index, own in enumerate(real):
        chosen = samples.completed & (run.requests["service_class"] == index)
        pooled = chosen[samples.gaps.request]
        gaps = np.repeat(samples.gaps.per_token_ms[pooled], samples.gaps.tokens[pooled].astype(np.int64))
        by_class["real"][own.name] = {"ttft_ms": samples.ttft[chosen].tolist(), "itl_ms": gaps.tolist()}
        first_ms = [
            1e3 * (one.first_s - one.arrival_s)
            for one in replay.requests
            if one.service_class.name == own.name and one.num_tokens
        ]
        twin_gaps = replay.run.gaps_s.get(own.name, ())
        by_class["twin"][own.name] = {"ttft_ms": first_ms, "itl_ms": [1e3 * gap_s for gap_s in twin_gaps]}
    return LoadComparison(
        load=load,
        real={one.name: Counts(one.met, one.late + one.met_at_retry, one.refused, one.failed) for one in real},
        twin={one.name: _twin_counts(one) for one in result.classes},
        retries={one.name: (one.came_back, one.retries_met) for one in real},
        figures=tuple(figures),
        refusal_ms=refusal_ms[at_once],
        given_up_ms=refusal_ms[~at_once],
        samples=by_class,
    )


def _twin_counts(one: ClassResult) -> Counts:
    return Counts(one.num_good, one.num_completed - one.num_good, one.num_refused, one.num_unfinished)


def _figures(own: ClassGoodput, other: ClassResult) -> Iterator[Figure]:
    for name, real, twin in (("TTFT", own.ttft, other.ttft_s), ("ITL", own.itl, other.inter_token_s)):
        for percent in PERCENTILES:
            is_judged = min(real.n, twin.n) * (1 - percent / 100) >= 1 and min(real.n, twin.n) >= MIN_SAMPLES
            yield Figure(own.name, f"{name} p{percent:g}", real.at(percent), 1e3 * twin.at(percent), is_judged)


def largest_error(one: LoadComparison) -> tuple[float, str]:
    """Returns the largest error of a percentile without its sign, and which one it is; NaN and "" without any."""
    judged = [figure for figure in one.figures if figure.is_judged and not math.isnan(figure.error)]
    if not judged:
        return math.nan, ""
    worst = max(judged, key=lambda figure: abs(figure.error))
    name = f"{worst.service_class} {worst.name}: {number(worst.real)} ms, twin {number(worst.twin)} ms"
    return abs(worst.error), name


def comparison_table(comparisons: Sequence[LoadComparison]) -> str:
    """Returns all figures as text, a line per load and class for counts, and one for each kind of latency."""
    lines = []
    for one in comparisons:
        lines.append(f"\n{one.load:g}x of the capacity{_refusals(one)}")
        for name, real in one.real.items():
            twin = one.twin[name]
            lines.append(
                f"  {name:14}met {_share(real)} (twin {_share(twin)}); met, late, refused, failed: "
                f"{_counts(real)} (twin {_counts(twin)}){_retries(one.retries[name])}"
            )
            for kind in ("TTFT", "ITL"):
                own = [each for each in one.figures if each.service_class == name and each.name.startswith(kind)]
                lines.append(f"  {'':14}{kind:5}" + "   ".join(map(_cell, own)))
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    percent = figure.name.rpartition(" ")[2]
    error = "" if math.isnan(figure.error) else f" {100 * figure.error:+.0f} %{'' if figure.is_judged else ' (few)'}"
    return f"{percent} {number(figure.real)} ms, twin {number(figure.twin)}{error}"


def _share(counts: Counts) -> str:
    return share(counts.met / sum(counts)) if sum(counts) else "-"


def _counts(counts: Counts) -> str:
    return " ".join(str(count) for count in counts)


def _retries(retries: tuple[int, int]) -> str:
    came_back, met = retries
    return f"; {came_back} came back when told, {share(met / came_back)} met their targets" if came_back else ""


def _refusals(one: LoadComparison) -> str:
    text = ""
    for what, values_ms in (("refused at once", one.refusal_ms), ("given up later", one.given_up_ms)):
        if len(values_ms):
            p50, p99 = np.percentile(values_ms, (50, 99))
            text += f"; {len(values_ms)} {what}, in p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    return text
