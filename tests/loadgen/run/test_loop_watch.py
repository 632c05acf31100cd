import asyncio
import time

import numpy as np

from loadgen.run.loop_watch import LoopWatch


class Clocks:
    """Three hands that are moved by the test."""

    def __init__(self) -> None:
        self.now_ns = self.cpu_ns = self.idle_ns = 0


def watch(clocks: Clocks) -> LoopWatch:
    return LoopWatch(lambda: clocks.idle_ns, lambda: clocks.now_ns, lambda: clocks.cpu_ns)


async def test_every_tick_that_a_hold_up_delays_is_late() -> None:
    clocks = Clocks()
    made = watch(clocks)
    made.start(0)
    for now_ms in (0, 10, 21, 75, 80):
        clocks.now_ns = now_ms * 1_000_000
        made.tick()
    made.stop()
    assert made.lag_ms().tolist() == [0, 0, 1, 45, 35, 25, 15, 5, 0]


async def test_a_loop_that_is_blocked_until_the_end_is_late() -> None:
    clocks = Clocks()
    made = watch(clocks)
    made.start(0)
    clocks.now_ns = 35_000_000
    made.stop()
    assert made.lag_ms().tolist() == [35, 25, 15, 5]


async def test_cpu_shares_are_per_second_and_without_what_was_burnt_waiting() -> None:
    clocks = Clocks()
    made = watch(clocks)
    made.start(0)
    for second, (used_s, idle_s) in enumerate([(0.5, 0.0), (0.9, 0.4), (1.5, 0.0), (0.1, 0.2)], start=1):
        clocks.now_ns = second * 1_000_000_000
        clocks.cpu_ns += round(used_s * 1e9)
        clocks.idle_ns += round(idle_s * 1e9)
        made.tick()
    made.stop()
    assert np.allclose(made.cpu_shares(), [0.5, 0.5, 1.5, 0.0])


async def test_a_busy_loop_shows_as_lag_and_as_cpu() -> None:
    made = LoopWatch(lambda: 0)
    begun_s = time.monotonic()
    made.start(time.monotonic_ns())
    await asyncio.sleep(0.2)
    until_s, burnt_s = time.monotonic() + 1.0, -time.process_time()
    while time.monotonic() < until_s:
        pass
    burnt_s += time.process_time()
    await asyncio.sleep(0.1)
    made.stop()
    lags_ms = made.lag_ms()
    assert len(lags_ms) >= 120
    assert lags_ms.max() >= 985
    assert np.sort(lags_ms)[-90] >= 90  # not one tick is late but all that were due meanwhile
    # The work is in one of the seconds, whole; on a busy machine it was less than a core's.
    assert made.cpu_shares().max() >= burnt_s / (time.monotonic() - begun_s)


async def test_a_start_in_the_future_is_waited_for() -> None:
    made = LoopWatch(lambda: 0)
    start_ns = time.monotonic_ns() + 100_000_000
    made.start(start_ns)
    while time.monotonic_ns() < start_ns - 5_000_000:
        await asyncio.sleep(0.001)
        assert len(made.lag_ms()) == 0 or time.monotonic_ns() >= start_ns
    made.stop()
