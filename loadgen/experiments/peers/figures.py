"""Figures of a comparison between Chairlift and its peers."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.bench.report import Result
from loadgen.experiments.systems import Comparison, tpot_s, ttfts_s

CHAIRLIFT = "Chairlift"
IN_PROCESS = "Chairlift, in process"
"""The engine alone, driven by token ids without a network, as the peers are."""
GOAL = 1.0
MAX_IDLE_CORES = 0.05


class Figures(NamedTuple):
    """Rows of the table, and the lines below it."""

    results: tuple[Result, ...]
    lines: tuple[str, ...]


def throughput_figures(label: str, comparison: Comparison) -> Figures:
    """Tokens per second and TTFT against the best of the peers.

    Args:
        label: model and workload.
        comparison: its samples are the seconds that the whole workload took.
    """
    lines = []
    p99s = {}
    for name, runs in comparison.runs.items():
        best = comparison.best_run(name)
        ttfts = ttfts_s(best)
        p99s[name] = min(_p99(ttfts_s(run)) for run in runs)
        lines.append(
            f"{label}: {name} {best.tokens_per_s:,.0f} tok/s, TTFT p50 {ttfts[len(ttfts) // 2]:.2f} s, "
            f"p99 {_p99(ttfts):.2f} s, TPOT {1e3 * tpot_s(best):.1f} ms, "
            f"CPU {statistics.median(comparison.cpu_s[name]):.2f} s"
        )
    rival = min((name for name in p99s if name != CHAIRLIFT), key=p99s.__getitem__)
    ttft_ratio = p99s[rival] / p99s[CHAIRLIFT]
    results = (
        _ratio(f"{label}, tok/s", comparison),
        Result("peers", f"{label}, 1 / TTFT p99", ttft_ratio, "x", GOAL, note=f"against {rival}"),
        _cpu_ratio(label, comparison),
        _idle(label, comparison),
    )
    return Figures(results, tuple(lines))


def latency_figures(label: str, comparison: Comparison) -> Figures:
    """Time per token and TTFT of one request alone, or of several that decode together, against the best of the peers.

    Args:
        label: model and workload.
        comparison: its samples are seconds per token.
    """
    lines = []
    for name, runs in comparison.runs.items():
        ttft_ms = 1e3 * min(ttfts_s(run)[-1] for run in runs)
        lines.append(f"{label}: {name} {1e3 * comparison.samples.best(name):.2f} ms a token, TTFT {ttft_ms:.1f} ms")
    results = [_ratio(f"{label}, 1 / time per token", comparison)]
    if IN_PROCESS in comparison.runs:
        results.append(_ratio(f"{label}, in process, 1 / time per token", comparison, IN_PROCESS))
    return Figures((*results, _idle(label, comparison)), tuple(lines))


def _ratio(what: str, comparison: Comparison, ours: str = CHAIRLIFT) -> Result:
    peers = (name for name in comparison.samples.raw if name not in (CHAIRLIFT, IN_PROCESS))
    rival = min(peers, key=comparison.samples.best)
    ratio = comparison.samples.ratio(rival, ours)
    note = f"against {rival}; rounds {ratio.low:.2f}..{ratio.high:.2f}"
    return Result("peers", what, ratio.best, "x", GOAL, note=note)


def _cpu_ratio(label: str, comparison: Comparison) -> Result:
    """Ratio of CPU seconds, medians of the rounds: on a shared machine it says more than wall time."""
    medians_s = {name: statistics.median(times_s) for name, times_s in comparison.cpu_s.items()}
    rival = min((name for name in medians_s if name != CHAIRLIFT), key=medians_s.__getitem__)
    own_s, rival_s = medians_s[CHAIRLIFT], medians_s[rival]
    note = f"against {rival}: {own_s:.2f} s and {rival_s:.2f} s, client included"
    return Result("peers", f"{label}, 1 / CPU s", rival_s / own_s, "x", note=note)


def _idle(label: str, comparison: Comparison) -> Result:
    """CPU use of idle systems: above the limit it distorts the other figures."""
    name, cores = max(comparison.idle_cores.items(), key=lambda item: item[1])
    note = f"the busiest: {name}"
    return Result("peers", f"{label}, cores busy while idle", cores, "", MAX_IDLE_CORES, "at most", note=note)


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, int(0.99 * len(ascending)))]
