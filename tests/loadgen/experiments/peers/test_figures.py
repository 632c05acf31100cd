import pytest

from chairlift.bench.alternate import Samples
from chairlift.bench.run import Run
from loadgen.experiments.peers.figures import CHAIRLIFT, IN_PROCESS, MAX_IDLE_CORES, latency_figures, throughput_figures
from loadgen.experiments.systems import Comparison


def run_of(wall_s: float, ttft_s: float) -> Run:
    """Two requests of two tokens each."""
    times_s = (ttft_s, wall_s)
    return Run(((1, 2), (1, 2)), (times_s, times_s), (0.0, 0.0), (), wall_s)


def comparison_of(seconds: dict[str, tuple[float, ...]], idle_cores: float = 0.0) -> Comparison:
    runs = {name: tuple(run_of(value, value / 10) for value in values) for name, values in seconds.items()}
    cpu_s = {name: tuple(2 * value for value in values) for name, values in seconds.items()}
    return Comparison(Samples(seconds), runs, dict.fromkeys(seconds, idle_cores), cpu_s)


def test_ratio_is_against_the_better_peer() -> None:
    figures = throughput_figures("x", comparison_of({CHAIRLIFT: (2.0, 4.0), "slow": (9.0, 9.0), "fast": (3.0, 8.0)}))
    rate, ttft, cpu, idle = figures.results
    assert cpu.figure == pytest.approx(11 / 6)  # medians: 11 s of "fast", 6 s of Chairlift
    assert "CPU 6.00 s" in figures.lines[0]
    assert rate.figure == 1.5
    assert "against fast" in rate.note
    assert ttft.figure == pytest.approx(1.5)
    assert idle.met
    assert len(figures.lines) == 3


def test_slower_than_a_peer_is_missed() -> None:
    rate, _ = latency_figures("x", comparison_of({CHAIRLIFT: (2.0,), "peer": (1.0,)})).results
    assert rate.figure == 0.5
    assert not rate.met


def test_the_engine_in_process_is_compared_with_the_peer_and_not_with_the_pair() -> None:
    contest = comparison_of({CHAIRLIFT: (2.0,), IN_PROCESS: (1.0,), "peer": (1.5,)})
    pair, in_process, _ = latency_figures("x", contest).results
    assert (pair.figure, in_process.figure) == (0.75, 1.5)
    assert "against peer" in pair.note
    assert "in process" in in_process.what


def test_busy_idler_is_a_missed_goal() -> None:
    contest = comparison_of({CHAIRLIFT: (1.0,), "peer": (2.0,)}, idle_cores=2 * MAX_IDLE_CORES)
    assert not latency_figures("x", contest).results[-1].met
