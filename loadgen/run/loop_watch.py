"""Measures how late an event loop runs its timers, and how much of a core its process uses."""

import asyncio
import time
from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

TICK_NS = 10_000_000
_SECOND_NS = 1_000_000_000


class LoopWatch:
    """Ticks every 10 ms at absolute times: a loop that was blocked for a second is late for a hundred ticks.

    Args:
        idle_ns: CPU time so far that the process used only to wait; it is left out.
        clock: nanoseconds.
        cpu_clock: nanoseconds of CPU time of the process.
    """

    def __init__(
        self,
        idle_ns: Callable[[], int],
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self._idle_ns = idle_ns
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lags_ns = array("q")
        self._cpu_shares = array("d")
        self._timer: asyncio.TimerHandle | None = None

    def start(self, start_ns: int) -> None:
        """Starts the ticks at this time of the clock, on the running event loop."""
        self._due_ns = start_ns
        self._second_ns = start_ns
        self._cpu_ns = self._used_ns()
        self._wait()

    def stop(self) -> None:
        """Stops the ticks; those that are overdue count, as the loop was blocked up to now."""
        if self._timer is not None:
            self._timer.cancel()
            self.tick()

    def lag_ms(self) -> NDArray[np.float64]:
        """Returns the delay of each tick, [ticks]."""
        return np.array(self._lags_ns, dtype=np.float64) / 1e6

    def cpu_shares(self) -> NDArray[np.float64]:
        """Returns the share of a core used in each second, [seconds]; above 1 if threads run on several cores."""
        return np.array(self._cpu_shares, dtype=np.float64)

    def tick(self) -> None:
        """Records all ticks that are due."""
        now_ns = self._clock()
        while self._due_ns <= now_ns:
            self._lags_ns.append(now_ns - self._due_ns)
            self._due_ns += TICK_NS
        if now_ns - self._second_ns >= _SECOND_NS:
            used_ns = self._used_ns()
            self._cpu_shares.append(max(used_ns - self._cpu_ns, 0) / (now_ns - self._second_ns))
            self._second_ns, self._cpu_ns = now_ns, used_ns

    def _wait(self) -> None:
        delay_s = max(self._due_ns - self._clock(), 0) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self.tick()
        self._wait()

    def _used_ns(self) -> int:
        return self._cpu_clock() - self._idle_ns()
