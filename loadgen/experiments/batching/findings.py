"""Sentences about the result of each case and its causes, made from its figures.

Pure. A sentence is there only if the figures say so.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from loadgen.experiments.batching.case_run import CaseRun
from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.policies import CACHED, CONTINUOUS, STATIC
from loadgen.experiments.batching.results import LATENCIES, CaseResult, percentile_of

_SAME = 0.03  # ratios this close to 1 are called the same
_CLEAR = 0.10  # and this far from it, worth a sentence
_GROWN = 2.0  # times to the first token that grow by this much are a queue that grows
_NOTABLE_CORES = 0.2
_PERCENTILES = (50, 99)


def findings(result: CaseResult) -> list[str]:
    """Sentences about a case, most important first."""
    if result.case.is_queued:
        return [*_steps_and_time(result), *_step_cost(result), *_latencies(result), *_prefix_cache(result)]
    return [*_keeping_up(result), *_latencies(result), *_prefix_cache(result)]


def sweep_title(points: Sequence[SweepPoint]) -> str:
    """Returns what the sweep is, for reports."""
    first, last = points[0].result.case, points[-1].result.case
    return f"{first.title} at {points[0].num_slots} slots, {len(last.trace):,} such at {points[-1].num_slots}"


def sweep_findings(points: Sequence[SweepPoint]) -> list[str]:
    """Sentences about the sweep."""
    by_time = max(points, key=lambda point: point.result.time_ratio().best)
    time = by_time.result.time_ratio()
    numbers = ", ".join(str(point.num_slots) for point in points)
    sentences = [
        f"Of {numbers} slots, {by_time.num_slots} gain most: static batches take {time.best:.2f} times as long, with "
        f"{by_time.result.step_ratio:.2f} times the steps."
    ]
    for name in (STATIC, CONTINUOUS):
        fastest = max(points, key=lambda point: point.result.best(name).tokens_per_s)
        sentences.append(
            f"{name.capitalize()} batching is fastest with {fastest.num_slots} slots: "
            f"{fastest.result.best(name).tokens_per_s:,.0f} tokens/s."
        )
    if wrong := [point.num_slots for point in points if not point.result.agrees_with_simulation]:
        sentences.append(f"The steps do NOT agree with the slots alone at {', '.join(map(str, wrong))} slots.")
    return sentences


def _steps_and_time(result: CaseResult) -> list[str]:
    steps, time = result.step_ratio, result.time_ratio()
    static, continuous = result.best(STATIC), result.best(CONTINUOUS)
    slots = (
        f"{100 * static.slot_use.utilisation:.1f} % of the slots were in use under static batching, "
        f"{100 * continuous.slot_use.utilisation:.1f} % under continuous"
    )
    if _is_even(result) and abs(time.best - 1) <= _CLEAR:
        return [
            f"No difference, as it should be: both take {len(continuous.steps):,} steps, and {time.best:.2f} times the "
            f"time is noise; {slots}."
        ]
    if time.low <= 1 <= time.high:
        verdict = f"time that is not clearly different ({time.low:.2f} to {time.high:.2f} times in single rounds)"
    else:
        verdict = f"{time.best:.2f} times the time ({time.low:.2f} to {time.high:.2f} in single rounds)"
        verdict += "" if time.best > 1 else ": static batching is FASTER here"
    return [f"Static batching takes {steps:.2f} times the steps and {verdict}; {slots}."]


def _is_even(result: CaseResult) -> bool:
    """Whether the policies have the same to do."""
    return result.case.is_queued and abs(result.step_ratio - 1) <= _SAME


def _step_cost(result: CaseResult) -> list[str]:
    """Time is steps times the mean time of a step: why the two ratios differ."""
    static, continuous = result.best(STATIC), result.best(CONTINUOUS)
    step_ms = {name: 1e3 * result.best(name).seconds / len(result.best(name).steps) for name in (STATIC, CONTINUOUS)}
    cost = step_ms[STATIC] / step_ms[CONTINUOUS]
    if _is_even(result):
        return []
    rows = {name: float(result.best(name).steps.rows.mean()) for name in (STATIC, CONTINUOUS)}
    sentences = [
        f"A static step has {rows[STATIC]:.1f} rows at the mean and takes {step_ms[STATIC]:.2f} ms, a continuous one "
        f"{rows[CONTINUOUS]:.1f} rows and {step_ms[CONTINUOUS]:.2f} ms: {result.step_ratio:.2f} times the steps at "
        f"{cost:.2f} times the cost make {result.step_ratio * cost:.2f} times the time."
    ]
    few, many = _cost_by_rows(static, continuous)
    if few is not None and many is not None:
        sentence = (
            f"A step of {few[0]} row{'s' if few[0] > 1 else ''} takes {few[1]:.2f} ms and one of {many[0]} rows "
            f"{many[1]:.2f} ms, {many[1] / few[1]:.1f} times as long"
        )
        if cost < 1 - _CLEAR:
            sentence += ": an empty slot saves time on this machine, so that the time trails the steps"
        elif cost <= 1 + _CLEAR:
            sentence += ": an empty slot saves next to nothing on this machine, so that the time follows the steps"
        sentences.append(sentence + ".")
    if continuous.client_cores >= _NOTABLE_CORES:
        sentences.append(
            f"Frontend and load generator kept {continuous.client_cores:.1f} cores of the same machine busy "
            f"({static.client_cores:.1f} under static batching): a token costs them the same, whatever the policy."
        )
    if cost > 1 + _CLEAR:
        sentences.append("Emptier steps that take longer are not the policies' doing: the machine was busy otherwise.")
    return sentences


Cost = tuple[int, float]


def _cost_by_rows(*case_runs: CaseRun) -> tuple[Cost | None, Cost | None]:
    """Rows and median milliseconds of the emptiest and the fullest steps without prompts, of sizes seen 8 times."""
    rows = np.concatenate([case_run.steps.rows for case_run in case_runs])
    tokens = np.concatenate([case_run.steps.tokens for case_run in case_runs])
    ms = np.concatenate([case_run.steps.ms for case_run in case_runs])
    sizes, counts = np.unique(rows[rows == tokens], return_counts=True)
    common = sizes[counts >= 8]
    if len(common) < 2:
        return None, None
    few, many = int(common[0]), int(common[-1])
    only = rows == tokens
    return (few, float(np.median(ms[only & (rows == few)]))), (many, float(np.median(ms[only & (rows == many)])))


def _keeping_up(result: CaseResult) -> list[str]:
    """Requests that arrive on their own: does the queue get longer?"""
    span_s = result.case.trace.span_s
    sentences = []
    for name in (STATIC, CONTINUOUS):
        case_run = result.best(name)
        quarter = max(1, len(case_run.latencies.ttft) // 4)
        first_ms, last_ms = np.median(case_run.latencies.ttft[:quarter]), np.median(case_run.latencies.ttft[-quarter:])
        sentence = (
            f"{name.capitalize()} batching had {100 * case_run.slot_use.utilisation:.0f} % of its slots in use and was "
            f"done {case_run.seconds - span_s:.1f} s after {span_s:.0f} s of arrivals"
        )
        if last_ms > _GROWN * first_ms:
            sentence += (
                f"; it did not keep up: the median TTFT grew from {first_ms:,.0f} ms in the first quarter to "
                f"{last_ms:,.0f} ms in the last"
            )
        sentences.append(sentence + ".")
    return sentences


def _latencies(result: CaseResult) -> list[str]:
    if _is_even(result):
        return []
    ratios = {
        (label, percentile): result.ratio(percentile_of(pick, percentile))
        for label, pick in LATENCIES.items()
        for percentile in _PERCENTILES
    }
    more = {name: ratio for name, ratio in ratios.items() if ratio > 1 + _CLEAR}
    less = {name: ratio for name, ratio in ratios.items() if ratio < 1 - _CLEAR}
    sentences = []
    if more:
        why = ": queued requests wait for the longest answer of a batch" if any(n == "TTFT" for n, _ in more) else ""
        sentences.append(f"Static batching has {_listed(more)}{why}.")
    if less:
        rows = {name: float(result.best(name).steps.rows.mean()) for name in (STATIC, CONTINUOUS)}
        is_emptier = rows[STATIC] < (1 - _CLEAR) * rows[CONTINUOUS]
        why = (
            ": its slots empty while a batch lasts, and the remaining requests share each step with fewer rows and "
            "no prompts"
        )
        has_reason = is_emptier and any(name == "TPOT" for name, _ in less)
        sentences.append(f"Static batching is ahead with {_listed(less)}{why if has_reason else ''}.")
    return sentences


def _listed(ratios: Mapping[tuple[str, int], float]) -> str:
    return ", ".join(f"{ratio:.2f} times the {name} (p{percentile})" for (name, percentile), ratio in ratios.items())


def _prefix_cache(result: CaseResult) -> list[str]:
    if CACHED not in result.rounds:
        return []
    share = result.best(CACHED).cached_share
    time = result.time_ratio(CONTINUOUS, CACHED)
    if share == 0:
        found = "Prompts share nothing here, so that the prefix cache finds nothing"
    else:
        found = f"{100 * share:.0f} % of the prompt tokens come from the prefix cache"
    if time.low <= 1 <= time.high or abs(time.best - 1) <= _SAME:
        return [f"{found}; with or without it, the time is the same within noise ({time.best:.2f} times)."]
    return [f"{found}; without it the run takes {time.best:.2f} times as long ({time.low:.2f} to {time.high:.2f})."]
