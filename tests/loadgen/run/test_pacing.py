import asyncio
import random

import pytest

from loadgen.run.pacing import SPIN_NS, Pacer


class FakeTime:
    """A clock that only moves when somebody sleeps, and a sleep that comes back late, by up to 1.5 ms."""

    def __init__(self, seed: int = 0, oversleep_ns: int = 1_500_000) -> None:
        self.now_ns = 1_000_000_000
        self._rng = random.Random(seed)
        self._oversleep_ns = oversleep_ns
        self.slept_s: list[float] = []

    def clock(self) -> int:
        return self.now_ns

    async def sleep(self, delay_s: float) -> None:
        assert delay_s >= 0
        self.slept_s.append(delay_s)
        self.now_ns += round(delay_s * 1e9)
        self.now_ns += self._rng.randint(0, self._oversleep_ns) if delay_s else 7_000
        await asyncio.sleep(0)


async def test_it_sleeps_to_a_millisecond_before_and_looks_at_the_clock_for_the_rest() -> None:
    time = FakeTime(oversleep_ns=0)
    pacer = Pacer(time.clock, time.sleep)
    await pacer.until(time.now_ns + 50_000_000)
    assert time.slept_s[0] == pytest.approx(0.049)
    assert set(time.slept_s[1:]) == {0}
    assert 0 <= time.now_ns - 1_050_000_000 < 10_000
    assert pacer.idle_ns == len(time.slept_s[1:]) * 7_000  # what was burnt to be on time


async def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    time = FakeTime()
    await Pacer(time.clock, time.sleep).until(time.now_ns - 1)
    await Pacer(time.clock, time.sleep).until(time.now_ns)
    assert time.slept_s == []


async def test_a_moment_nearer_than_the_spin_is_not_slept_for() -> None:
    time = FakeTime()
    await Pacer(time.clock, time.sleep).until(time.now_ns + SPIN_NS)
    assert set(time.slept_s) == {0}
