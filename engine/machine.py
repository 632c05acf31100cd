"""What this machine gives a process: cores and memory, control groups included."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """Cores this process may keep busy: its affinity, cut by the control group's quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = _words(cgroup / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cpus = min(cpus, max(1, int(quota[0]) // int(quota[1])))
    return cpus


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Memory that can be had without swapping: of the machine, cut by the control group's limit. Page cache counts as
    free.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if limit and used and limit[0] != "max":
        words = _words(cgroup / "memory.stat")
        stat = dict(zip(words[::2], map(int, words[1::2]), strict=False))
        num_cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        available = min(available, max(0, int(limit[0]) - int(used[0]) + num_cached))
    return available


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
