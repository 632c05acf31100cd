"""Benchmark cases: correctness checks, floors and goals, timing, the journal and the budget."""

from pathlib import Path

import pytest
import torch

from chairlift.bench.report import Result
from kernels.bench.budget import Budget
from kernels.bench.case import Case, Prepared, WrongResultError, num_copies, relative_error, run_case
from kernels.bench.ceilings import Ceilings, measure_ceilings
from kernels.bench.device import BenchDevice, open_device
from kernels.bench.journal import Journal
from kernels.bench.timing import Timing, time_calls

CEILINGS = Ceilings(1e9, {"bfloat16": 1e12}, {})


@pytest.fixture
def device() -> BenchDevice:
    return open_device("cpu")


def case(**changes) -> Case:
    usual = {"what": "a copy", "num_bytes": 10**6, "unit": "GB/s", "max_error": 1e-3}
    return Case(**{"prepare": lambda: Prepared([lambda: None], lambda: 0.0), **usual, **changes})


def test_a_wrong_kernel_is_not_timed(device: BenchDevice) -> None:
    calls = []
    for error in (1e-2, float("nan")):
        wrong = case(prepare=lambda error=error: Prepared([lambda: calls.append(1)], lambda: error))
        with pytest.raises(WrongResultError, match="a copy: relative error"):
            run_case(wrong, device, CEILINGS, seconds=0.0)
    assert not calls


def test_the_floor_is_what_takes_longer_or_the_sum_of_parts() -> None:
    assert case().floor_s(CEILINGS) == 1e-3
    assert case(num_flops=3 * 10**9).floor_s(CEILINGS) == 3e-3
    assert case(num_flops=3 * 10**9, adds_up=True).floor_s(CEILINGS) == 4e-3


def test_goals_and_floors_are_in_the_unit_of_the_figure(device: BenchDevice) -> None:
    figure, timing = run_case(case(goal_id="G10", goal_fraction=0.88), device, CEILINGS, seconds=0.0)
    assert (figure.unit, figure.floor, figure.goal) == ("GB/s", 1.0, pytest.approx(0.88))
    assert figure.figure == pytest.approx(1e-3 / timing.median_s)
    slow, _ = run_case(case(unit="us", goal_fraction=0.5), device, CEILINGS, seconds=0.0)
    assert (slow.floor, slow.goal, slow.direction) == (1000.0, 2000.0, "at most")
    assert slow.met
    rate, _ = run_case(case(unit="TFLOP/s", num_flops=10**12, goal_rate=420.0), device, CEILINGS, seconds=0.0)
    assert (rate.floor, rate.goal) == (1.0, 420.0)


def test_inputs_are_four_times_the_cache(device: BenchDevice) -> None:
    assert num_copies(device, device.l2_bytes) == 4
    assert num_copies(device, 1) == 64
    assert num_copies(device, 100 * device.l2_bytes) == 1


def test_the_error_is_relative_to_the_whole() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected + torch.tensor([0.0, 0.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan"), 0.0]), expected) != pytest.approx(0)


def test_calls_are_timed_by_the_clock_on_a_cpu() -> None:
    count = []
    timing = time_calls([lambda: count.append(1), lambda: count.append(2)], torch.device("cpu"), seconds=0.0)
    assert timing.method == "clock"
    assert len(timing.samples_s) == 3
    assert count == [1, 2] * 4


def test_the_spread_leaves_the_extremes_out() -> None:
    timing = Timing((1.0, *(10.0,) * 9, 100.0), "clock")
    assert timing.median_s == 10.0
    assert timing.spread == 0.0


def test_ceilings_of_a_cpu(device: BenchDevice) -> None:
    ceilings = measure_ceilings(device.device, quick=True, seconds=0.0)
    assert ceilings.bytes_per_s > 0
    assert set(ceilings.flops) == {"float32"}
    assert "copy" in str(ceilings)


def test_journal_of_a_killed_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.add(Result("G1", "a", 1.0, "ms"))
    journal.leave_out("b")
    journal.fail("c")
    journal.keep({"d": [1, 2]})
    path.write_text(path.read_text() + '{"result": {"benchmark_id')  # killed while it wrote
    reader = Journal()
    reader.absorb(path)
    assert reader.results == journal.results
    assert (reader.left_out, reader.problems, reader.raw) == (["b"], ["c"], {"d": [1, 2]})
    reader.absorb(tmp_path / "nothing")


def test_a_budget_is_spent() -> None:
    now = [0.0]
    budget = Budget(10.0, clock=lambda: now[0])
    assert budget.allows(10.0)
    now[0] = 7.0
    assert budget.left_s == 3.0
    assert not budget.allows(3.5)
    now[0] = 70.0
    assert budget.left_s == 0.0
