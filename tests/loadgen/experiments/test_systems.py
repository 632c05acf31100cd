import os
import threading
import time
from collections.abc import Callable

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from loadgen.experiments.systems import (
    Comparison,
    compare,
    decode_s,
    latency_s,
    on_cpus,
    tpot_s,
    ttfts_s,
    with_fresh_prompts,
)

WORKLOAD = Workload(((1, 2, 3), (1, 2, 9)), (2, 1))


def answer(workload: Workload, wall_s: float = 1.0) -> Run:
    """Each token a tenth of a second after the one before."""
    return Run(
        output_ids=tuple((5,) * limit for limit in workload.max_tokens),
        token_times_s=tuple(tuple(0.1 * (i + 1) for i in range(limit)) for limit in workload.max_tokens),
        arrivals_s=(0.0,) * len(workload.prompts),
        steps=(),
        wall_s=wall_s,
    )


class Fake:
    """Answers at once, and remembers what it was asked."""

    def __init__(self, pids: frozenset[int] = frozenset(), generate: Callable[[Workload], Run] = answer) -> None:
        self.pids = pids
        self.asked: list[Workload] = []
        self._generate = generate

    def generate(self, workload: Workload) -> Run:
        self.asked.append(workload)
        return self._generate(workload)


def run_comparison(systems: dict[str, Fake], rounds: int = 3) -> Comparison:
    return compare(
        systems,
        WORKLOAD,
        vocab_size=50,
        measure=lambda run: run.wall_s,
        rounds=rounds,
        progress=lambda _: None,
    )


def test_every_round_has_prompts_of_its_own_and_all_systems_get_the_same() -> None:
    a, b = Fake(), Fake()
    comparison = run_comparison({"a": a, "b": b})
    assert a.asked == b.asked
    assert len({workload.prompts for workload in a.asked}) == 4  # three rounds and a warm-up
    assert len(comparison.runs["a"]) == len(comparison.samples.raw["a"]) == 3


def test_cpu_seconds_are_those_of_the_system_and_of_this_process() -> None:
    def burn(workload: Workload) -> Run:
        end_s = time.process_time() + 0.05
        while time.process_time() < end_s:
            pass
        return answer(workload)

    comparison = run_comparison({"busy": Fake(generate=burn), "idle": Fake()})
    assert len(comparison.cpu_s["busy"]) == 3
    assert min(comparison.cpu_s["busy"]) >= 0.05
    assert min(comparison.cpu_s["idle"]) < 0.05


def test_fresh_prompts_keep_lengths_and_shared_prefixes() -> None:
    fresh = with_fresh_prompts(WORKLOAD, 3, vocab_size=50)
    first, second = fresh.prompts
    assert [len(first), len(second)] == [3, 3]
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert first != WORKLOAD.prompts[0]
    assert with_fresh_prompts(WORKLOAD, 0, vocab_size=50) == WORKLOAD


@pytest.mark.parametrize("turn", range(60))
def test_fresh_prompts_stay_in_the_vocabulary_without_the_end_token(turn: int) -> None:
    every_id = Workload((tuple(range(1, 50)),), (1,))
    (prompt,) = with_fresh_prompts(every_id, turn, vocab_size=50).prompts
    assert sorted(prompt) == list(range(1, 50))


def test_best_run_is_that_of_the_best_sample() -> None:
    walls_s = iter([9.0, 3.0, 1.0, 2.0])
    comparison = run_comparison({"a": Fake(generate=lambda workload: answer(workload, next(walls_s)))})
    assert comparison.samples.best("a") == comparison.best_run("a").wall_s == 1.0


def test_answer_of_another_length_ends_the_comparison() -> None:
    cut = Fake(generate=lambda workload: answer(Workload(workload.prompts, (2, 0))))
    with pytest.raises(BenchmarkError, match="cut: request 1 got 0 tokens of 1"):
        run_comparison({"whole": Fake(), "cut": cut})


def test_busy_idler_is_seen() -> None:
    # This process is the idler: it spins on a thread while the other one waits.
    idle_pid = frozenset({os.getpid()})
    cpu_s, begun_s = 0.1, time.monotonic()

    def wait_while_somebody_spins(workload: Workload) -> Run:
        spinner = threading.Thread(target=_spin, args=(cpu_s,))
        spinner.start()
        spinner.join()
        return answer(workload)

    comparison = run_comparison({"idler": Fake(idle_pid), "other": Fake(generate=wait_while_somebody_spins)}, rounds=1)
    wall_s = time.monotonic() - begun_s  # more than the two turns, the warm-up included, have taken
    assert comparison.idle_cores["idler"] * wall_s > cpu_s
    assert comparison.idle_cores["other"] == 0.0


def test_system_is_not_idle_while_another_one_of_its_process_runs() -> None:
    pids = frozenset({os.getpid()})
    comparison = run_comparison({"a": Fake(pids), "b": Fake(pids)})
    assert comparison.idle_cores == {"a": 0.0, "b": 0.0}


def test_times_of_a_run() -> None:
    run = answer(Workload(((1,), (2,)), (3, 1)))
    assert tpot_s(run) == pytest.approx(0.1)
    assert ttfts_s(run) == [0.1, 0.1]
    assert tpot_s(answer(Workload(((1,),), (1,)))) == 0.0


def test_on_cpus_narrows_and_restores() -> None:
    before = os.sched_getaffinity(0)
    with on_cpus(1):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def _spin(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def run_of(times_s: tuple[tuple[float, ...], ...]) -> Run:
    ids = tuple((5,) * len(times) for times in times_s)
    return Run(ids, times_s, (0.0,) * len(ids), (), max(times[-1] for times in times_s))


def test_decode_time_is_that_in_which_all_decode() -> None:
    early, late = (1.0, 9.0, 10.0, 11.0, 12.0), (8.0, 9.0, 10.0, 11.0, 12.0, 40.0)
    assert decode_s(run_of((early, late))) == pytest.approx(
        1.0
    )  # from 8 to 12 s: the first gap and the last are not in it


def test_answers_that_arrive_whole_take_the_time_of_the_run() -> None:
    assert decode_s(run_of(((3.0, 3.0), (6.0, 6.0)))) == 3.0


def test_latency_counts_the_wait_for_a_late_first_token() -> None:
    steady, late = (1.0, 2.0, 3.0, 4.0), (4.0, 4.0, 4.0, 4.0)
    assert latency_s(run_of((steady,))) == latency_s(run_of((late,))) == 1.0
