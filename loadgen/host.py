"""What a result must say about where it was measured."""

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.bench.report import git_revision

_PACKAGES = ("chairlift", "grpcio", "protobuf", "aiohttp", "numpy")
_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # of a line of /proc/stat: idle, and waiting for a disk
_TIMES = slice(0, 8)  # what comes after them are guests, who are counted already


class CoreTimes(NamedTuple):
    """Ticks since the machine started, of all cores this process may use together."""

    busy: int
    total: int


def core_times(stat: Path = _STAT) -> CoreTimes | None:
    """How the cores spent their time so far, all processes together; None where the system does not say (not Linux)."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    cores = [[int(value) for value in values[_TIMES]] for name, *values in lines if name in ours]
    total, idle = sum(map(sum, cores)), sum(sum(core[_IDLE]) for core in cores)
    return CoreTimes(total - idle, total) if total else None


class HostWatch:
    """Usage of the cores that this process may use, second by second, by all processes.

    Args:
        read: the cores' times so far.
        clock: seconds.
    """

    def __init__(
        self, read: Callable[[], CoreTimes | None] = core_times, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._first = self._last = read()
        self._last_s = clock()
        self._peak = 0.0

    def look(self) -> None:
        """To be called several times a second."""
        now_s = self._clock()
        if now_s - self._last_s >= 1.0:
            now = self._read()
            self._peak = max(self._peak, _share(self._last, now))
            self._last, self._last_s = now, now_s

    def busy(self) -> dict[str, float] | None:
        """Share of all cores in use, on average and in the busiest second, since it was made; None if not known."""
        now = self._read()
        if self._first is None or now is None:
            return None
        mean = _share(self._first, now)
        return {"mean": round(mean, 4), "peak": round(max(mean, self._peak), 4)}


def busy_now() -> float | None:
    """Share of the cores that is in use without us: sleeps for a second meanwhile. None if not known."""
    watch = HostWatch()
    time.sleep(1.0)
    busy = watch.busy()
    return None if busy is None else busy["mean"]


def _share(before: CoreTimes | None, after: CoreTimes | None) -> float:
    if before is None or after is None or after.total <= before.total:
        return 0.0
    return (after.busy - before.busy) / (after.total - before.total)


def describe_host() -> dict[str, Any]:
    """The machine, the software and the revision of the sources, as JSON can hold it."""
    return {
        "hostname": platform.node(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "packages": {package: found for package in _PACKAGES if (found := _version(package))},
        "revision": git_revision(Path(__file__).parent),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
