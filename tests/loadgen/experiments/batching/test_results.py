"""Ratios, tables and the words made of them, on cases that an ideal engine has run."""

import dataclasses
import random

import numpy as np
import pytest

from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.findings import findings, sweep_findings, sweep_title
from loadgen.experiments.batching.policies import CACHED, CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult, table
from loadgen.experiments.batching.simulation import rows_of_steps
from tests.support.loadgen.batching import ideal_result

SKEWED = ([4] * 7 + [64]) * 4


def row(result: CaseResult, label: str) -> tuple[str, ...]:
    (found,) = [row for row in table(result) if row.label == label]
    return (*found.values, found.ratio)


def as_paced(result: CaseResult, arrival_s: list[float]) -> CaseResult:
    trace = dataclasses.replace(result.case.trace, arrival_s=np.array(arrival_s))
    return dataclasses.replace(result, case=dataclasses.replace(result.case, trace=trace, is_queued=False))


def test_figures_are_those_of_the_fastest_round_and_spreads_those_of_single_rounds() -> None:
    result = ideal_result(SKEWED, 8, noise=(1.5, 1.0, 1.25))
    assert result.best(STATIC) is result.rounds[STATIC][1]
    static, continuous = ([case_run.seconds for case_run in result.rounds[name]] for name in (STATIC, CONTINUOUS))
    assert result.time_ratio().best == pytest.approx(min(static) / min(continuous))
    assert result.time_ratio().low == pytest.approx(result.time_ratio().high)


def test_the_ratio_of_steps_is_that_of_the_bare_slots() -> None:
    result = ideal_result(SKEWED, 8)
    assert (result.simulated_steps(STATIC), len(result.best(STATIC).steps)) == (256, 256)
    continuous = len(rows_of_steps(SKEWED, 8, static=False))
    assert result.step_ratio == result.simulated_step_ratio == pytest.approx(256 / continuous)
    assert row(result, "steps") == ("256", str(continuous), str(continuous), f"{256 / continuous:.2f}")
    assert result.agrees_with_simulation


def test_an_engine_that_wastes_steps_is_noticed() -> None:
    result = ideal_result(SKEWED, 8)
    honest = result.best(STATIC)
    steps = dataclasses.replace(honest.steps, rows=np.resize(honest.steps.rows, 275))
    lazy = CaseResult(result.case, {**result.rounds, STATIC: [dataclasses.replace(honest, steps=steps)] * 2})
    assert not lazy.agrees_with_simulation
    (note,) = [row.note for row in table(lazy) if row.label == "steps"]
    assert note.endswith("off by +7.4 %: MORE THAN 5 %")


@pytest.mark.parametrize("seed", range(5))
def test_the_table_agrees_with_figures_counted_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    outputs = [rng.randint(1, 30) for _ in range(40)]
    result = ideal_result(outputs, 8, step_ms=lambda rows: 5.0, noise=(1.0,))
    batches = [outputs[start : start + 8] for start in range(0, 40, 8)]
    steps = sum(map(max, batches))
    assert row(result, "slots in use, %")[0] == f"{100 * sum(outputs) / (8 * steps):.1f}"
    padded = sum(len(batch) * (32 + max(batch) - 1) for batch in batches)
    assert row(result, "tokens, padded over computed")[0] == f"{padded / (40 * 31 + sum(outputs)):.2f}"
    begins = np.repeat(np.cumsum([0, *map(max, batches[:-1])]), 8) * 5.0
    assert row(result, "TTFT, p50, ms")[0] == f"{np.median(begins + 5.0):,.2f}"
    normalized = (begins + 5.0 * np.array(outputs)) / outputs
    assert row(result, "normalized latency, p99, ms")[0] == f"{np.percentile(normalized, 99):,.2f}"
    assert row(result, "TPOT, p50, ms")[0] == "5.00"


def test_time_that_trails_the_steps_is_explained_by_what_a_step_costs() -> None:
    first, cost, curve, *_ = findings(ideal_result(SKEWED, 8, step_ms=lambda rows: 1.0 + rows))
    assert "times the steps and" in first
    assert "FASTER" not in first
    assert "make" in cost
    assert curve.startswith("A step of 1 row takes 2.00 ms and one of 8 rows 9.00 ms, 4.5 times as long")
    assert "an empty slot saves time on this machine, so that the time trails the steps" in curve


def test_time_that_follows_the_steps_is_said_to() -> None:
    sentences = findings(ideal_result(SKEWED, 8, step_ms=lambda rows: 5.0 + 0.01 * rows))
    assert any("saves next to nothing on this machine, so that the time follows the steps" in s for s in sentences)


def test_static_batching_that_wins_is_said_to_win() -> None:
    sentences = findings(ideal_result(SKEWED, 8, step_ms=lambda rows: 0.1 + rows**2.5))
    assert "static batching is FASTER here" in sentences[0]
    (ahead,) = [sentence for sentence in sentences if sentence.startswith("Static batching is ahead with")]
    assert "TTFT (p99)" in ahead


def test_what_the_clients_cost_is_said_where_it_matters() -> None:
    result = ideal_result(SKEWED, 8)
    for cores, is_said in ((0.05, False), (0.8, True)):
        changed = [dataclasses.replace(case_run, client_cores=cores) for case_run in result.rounds[CONTINUOUS]]
        sentences = findings(CaseResult(result.case, {**result.rounds, CONTINUOUS: changed}))
        assert any(f"Frontend and load generator kept {cores:.1f} cores" in s for s in sentences) == is_said


def test_uniform_answers_make_no_difference() -> None:
    result = ideal_result([12] * 24, 8)
    static = result.best(STATIC)
    noisy = dataclasses.replace(
        static, latencies=dataclasses.replace(static.latencies, ttft=1.3 * static.latencies.ttft)
    )
    first, *others = findings(CaseResult(result.case, {**result.rounds, STATIC: [noisy, noisy]}))
    assert first.startswith("No difference, as it should be: both take 36 steps")
    assert not any("queued requests wait" in sentence for sentence in others)


def test_rounds_that_disagree_make_no_verdict() -> None:
    result = ideal_result(SKEWED, 8, noise=(1.0, 1.0))
    rounds = {**result.rounds}
    slow = dataclasses.replace(result.best(CONTINUOUS), seconds=10 * result.best(CONTINUOUS).seconds)
    rounds[CONTINUOUS] = [result.best(CONTINUOUS), slow]
    assert "time that is not clearly different" in findings(CaseResult(result.case, rounds))[0]


def test_the_prefix_cache_says_what_it_found() -> None:
    *_, nothing = findings(ideal_result(SKEWED, 8, cached=0))
    assert "Prompts share nothing here" in nothing
    *_, half = findings(ideal_result(SKEWED, 8, cached=16))
    assert half.startswith(f"{100 * 31 * 16 / (32 * 32):.0f} % of the prompt tokens come from the prefix cache")
    assert "the same within noise" in half


def test_a_queue_that_grows_is_noticed() -> None:
    paced = as_paced(ideal_result(SKEWED, 8), [0.1 * index for index in range(32)])
    sentences = findings(paced)
    assert "it did not keep up: the median TTFT grew" in sentences[0]
    (note,) = [row.note for row in table(paced) if row.label == "steps"]
    assert note == "arrivals decide how full the steps are"


def test_the_sweep_names_where_static_batching_loses_most() -> None:
    points = [SweepPoint(slots, ideal_result(SKEWED, slots, key="sweep")) for slots in (2, 8, 32)]
    ratios = {point.num_slots: point.result.time_ratio().best for point in points}
    most = max(ratios, key=lambda slots: ratios[slots])
    assert sweep_findings(points)[0].startswith(
        f"Of 2, 8, 32 slots, {most} gain most: static batches take {ratios[most]:.2f}"
    )
    assert sweep_title(points) == "32 answers at 2 slots, 32 such at 32"


def test_systems_are_in_the_order_of_their_turns() -> None:
    assert list(ideal_result([2, 3], 2).rounds) == [STATIC, CONTINUOUS, CACHED]
