"""Results of simulations as tables of text."""

import math
from collections.abc import Iterator, Sequence

from loadgen.measure.quantiles import Distribution
from loadgen.report.figures import duration, number, percent, share
from loadgen.simulation.calibration import Fit
from loadgen.simulation.results import ClassResult, SimulationResult
from loadgen.simulation.sizing import Sizing
from loadgen.simulation.step_cost import StepCost
from loadgen.simulation.study import LoadResult

_COLUMNS = (
    "policy", "good/s", "good", "good tok/s", "longest 1/4", "TTFT p50/p90/p99", "ITL p50/p90/p99", "cached", "in vain",
    "busy", "cost",
)  # fmt: skip


def load_lines(studied: LoadResult) -> Iterator[str]:
    """Yields a table of all policies at one load, and one of their classes."""
    first = studied.results[0]
    at_once = math.isnan(first.offered_per_s)
    offered = "all requests at once" if at_once else f"{first.offered_per_s:.4g} requests/s for {first.span_s:.4g} s"
    most = "" if at_once else f", {studied.bound * first.offered_per_s:.2f}/s"
    yield f"load {studied.load:g}: {offered}; no policy can exceed {_percent(studied.bound)} good{most}"
    yield from _table([_COLUMNS, *(_row(result) for result in studied.results)])
    names = [one.name for one in first.classes]
    if len(names) > 1:
        yield ""
        yield from _table(
            [
                ("good by class", *names),
                *((result.policy, *(_class_cell(one) for one in result.classes)) for result in studied.results),
            ]
        )


def sizing_lines(sizing: Sizing, goal: float) -> Iterator[str]:
    """Yields the answer to "how many engines", and what was tried."""
    for num_engines, good in sizing.tried:
        yield f"  {num_engines:>5}: {share(good)} good"
    if sizing.num_engines is None:
        yield f"not enough: {_engines(sizing.tried[-1][0])} for {share(goal)} good"
    else:
        yield f"{_engines(sizing.num_engines)} for {share(goal)} good"


def cost_line(cost: StepCost) -> str:
    """The coefficients, with units."""
    step_s, token_s, row_s, kv_token_s, pair_s = cost.coefficients
    return (
        f"step = {step_s * 1e3:.3g} ms + {token_s * 1e6:.4g} us/token (at least {cost.knee_tokens}) + "
        f"{row_s * 1e6:.4g} us/row + {kv_token_s * 1e9:.4g} ns/KV token + {pair_s * 1e9:.4g} ns/pair"
    )


def fit_lines(fit: Fit, num_left_out: int) -> Iterator[str]:
    """Yields the fitted cost and its error."""
    yield f"fitted to {fit.num_training} steps, {num_left_out} of unknown shape left out: {cost_line(fit.cost)}"
    for what, errors in (
        (f"these {fit.num_training} steps", fit.training_error),
        (f"{fit.num_test} steps not seen", fit.test_error),
    ):
        if errors:
            p50, p90, p99 = (share(round(error, 4)) for error in errors)
            yield f"error on {what}: p50 {p50}, p90 {p90}, p99 {p99}"


def _engines(count: int) -> str:
    return f"{count} engine{'s' * (count > 1)}"


def _row(result: SimulationResult) -> tuple[str, ...]:
    return (
        result.policy,
        _rate(result.good_requests_per_s, 2),
        _percent(result.total.good_share),
        _rate(result.good_tokens_per_s, 0),
        _percent(result.longest_quarter_share),
        _latencies(result.total.ttft_s),
        _latencies(result.total.inter_token_s),
        _percent(result.cache_hit_share),
        _percent(result.vain_work_share),
        _percent(result.busy_share),
        f"{number(result.accelerator_s_per_good_mtoken)} s",
    )


def _class_cell(one: ClassResult) -> str:
    return f"{_percent(one.good_share)} (TTFT p99 {duration(1e3 * one.ttft_s.p99)})"


def _latencies(values: Distribution) -> str:
    return " / ".join(duration(1e3 * values.at(percentile)).replace(" ", "") for percentile in (50.0, 90.0, 99.0))


def _rate(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{percent(value, 1)} %"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()
