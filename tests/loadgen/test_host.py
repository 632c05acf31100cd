"""How busy the machine was while a run was on."""

import os
from pathlib import Path

import pytest

from loadgen.host import CoreTimes, HostWatch, core_times


class Machine:
    """Cores whose clock is turned by hand: 100 ticks a second each."""

    def __init__(self) -> None:
        self.now_s, self.times = 0.0, CoreTimes(500, 10_000)

    def passes(self, seconds: float, busy: float) -> None:
        self.now_s += seconds
        ticks = round(200 * seconds)
        self.times = CoreTimes(self.times.busy + round(busy * ticks), self.times.total + ticks)


def test_the_busiest_second_and_the_average() -> None:
    machine = Machine()
    watch = HostWatch(lambda: machine.times, lambda: machine.now_s)
    for busy in (0.0, 0.0, 1.0, 1.0, 0.5, 0.5):  # looked at twice a second
        machine.passes(0.5, busy)
        watch.look()
    found = watch.busy()
    assert found is not None
    assert [found["mean"], found["peak"]] == pytest.approx([0.5, 1.0])


def test_a_run_shorter_than_a_second_has_its_average() -> None:
    machine = Machine()
    watch = HostWatch(lambda: machine.times, lambda: machine.now_s)
    machine.passes(0.5, 0.8)
    found = watch.busy()
    assert found is not None
    assert [found["mean"], found["peak"]] == pytest.approx([0.8, 0.8])


def test_a_system_that_does_not_say_is_not_guessed_at() -> None:
    assert HostWatch(lambda: None).busy() is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
def test_work_of_any_kind_on_our_cores_counts_and_waiting_does_not(tmp_path: Path) -> None:
    ours = min(os.sched_getaffinity(0))
    stat = tmp_path / "stat"
    #                    user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text(f"cpu {'9 ' * 10}\ncpu{ours} 100 20 30 4000 500 6 7 8 99 99\ncpu99999 {'9 ' * 10}\nintr 5 1\n")
    assert core_times(stat) == CoreTimes(100 + 20 + 30 + 6 + 7 + 8, 100 + 20 + 30 + 4000 + 500 + 6 + 7 + 8)


def test_a_system_without_that_file_says_nothing(tmp_path: Path) -> None:
    assert core_times(tmp_path / "stat") is None
