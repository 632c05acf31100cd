"""From a contest between Chairlift and its peers to the figures that are printed."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.bench.report import Result
from loadgen.experiments.contest import Contest, tpot_s, ttfts_s

CHAIRLIFT = "Chairlift"
GOAL = 1.0
MAX_IDLE_CORES = 0.05


class Figures(NamedTuple):
    """Rows of the table, and lines for people below it."""

    results: tuple[Result, ...]
    lines: tuple[str, ...]


def throughput_figures(label: str, contest: Contest) -> Figures:
    """Tokens per second and TTFT against the best of the peers.

    Args:
        label: model and workload.
        contest: its samples are the seconds that the whole workload took.
    """
    lines = []
    p99s = {}
    for name, runs in contest.runs.items():
        best = contest.best_run(name)
        ttfts = ttfts_s(best)
        p99s[name] = min(_p99(ttfts_s(run)) for run in runs)
        lines.append(
            f"{label}: {name} {best.tokens_per_s:,.0f} tok/s, TTFT p50 {ttfts[len(ttfts) // 2]:.2f} s, "
            f"p99 {_p99(ttfts):.2f} s, TPOT {1e3 * tpot_s(best):.1f} ms, "
            f"CPU {statistics.median(contest.cpu_s[name]):.2f} s"
        )
    rival = min((name for name in p99s if name != CHAIRLIFT), key=p99s.__getitem__)
    ttft_ratio = p99s[rival] / p99s[CHAIRLIFT]
    results = (
        _ratio(f"{label}, tok/s", contest),
        Result("peers", f"{label}, 1 / TTFT p99", ttft_ratio, "x", GOAL, note=f"against {rival}"),
        _cpu_ratio(label, contest),
        _idle(label, contest),
    )
    return Figures(results, tuple(lines))


def alone_figures(label: str, contest: Contest) -> Figures:
    """TPOT and TTFT of one request alone against the best of the peers.

    Args:
        label: model and workload.
        contest: its samples are seconds per token after the first.
    """
    lines = []
    for name, runs in contest.runs.items():
        ttft_ms = 1e3 * min(ttfts_s(run)[0] for run in runs)
        lines.append(f"{label}: {name} TPOT {1e3 * contest.samples.best(name):.2f} ms, TTFT {ttft_ms:.1f} ms")
    return Figures((_ratio(f"{label}, 1 / TPOT", contest), _idle(label, contest)), tuple(lines))


def _ratio(what: str, contest: Contest) -> Result:
    rival = min((name for name in contest.samples.raw if name != CHAIRLIFT), key=contest.samples.best)
    ratio = contest.samples.ratio(rival, CHAIRLIFT)
    note = f"against {rival}; rounds {ratio.low:.2f}..{ratio.high:.2f}"
    return Result("peers", what, ratio.best, "x", GOAL, note=note)


def _cpu_ratio(label: str, contest: Contest) -> Result:
    """CPU seconds beside wall time: where others use the machine too, they say more. Medians of the rounds."""
    medians_s = {name: statistics.median(times_s) for name, times_s in contest.cpu_s.items()}
    rival = min((name for name in medians_s if name != CHAIRLIFT), key=medians_s.__getitem__)
    ours_s, theirs_s = medians_s[CHAIRLIFT], medians_s[rival]
    note = f"against {rival}: {ours_s:.2f} s and {theirs_s:.2f} s, client included"
    return Result("peers", f"{label}, 1 / CPU s", theirs_s / ours_s, "x", note=note)


def _idle(label: str, contest: Contest) -> Result:
    """Whoever is busy while it has nothing to do takes from the one that runs: the other figures are off then."""
    name, cores = max(contest.idle_cores.items(), key=lambda item: item[1])
    note = f"the busiest: {name}"
    return Result("peers", f"{label}, cores busy while idle", cores, "", MAX_IDLE_CORES, "at most", note=note)


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, int(0.99 * len(ascending)))]
