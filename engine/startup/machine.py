"""Cores and memory available to this process, including limits of control groups (versions 1 and 2)."""

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_MATRIX_BYTES = 256 << 10
_ACTIVATIONS_BYTES = 6 << 20


class _Limit(NamedTuple):
    """Memory of a control group, in bytes."""

    limit: int
    used: int
    cached: int


def usable_cores(cgroup: Path = _CGROUP, cpus: Path = _CPUS, own_groups: Path = _OWN_GROUPS) -> int:
    """Returns the number of usable cores, at least 1.

    Hardware threads of one core count once: they share its arithmetic units, and one that waits for the others takes
    its turns from them.
    """
    topologies = (cpus / f"cpu{number}" / "topology" for number in _affinity())
    # the older name of the list is that of kernels before 5.3
    cores = {_word(path / "core_cpus_list") or _word(path / "thread_siblings_list") or str(path) for path in topologies}
    return min(len(cores), usable_cpus(cgroup, own_groups))


def usable_cpus(cgroup: Path = _CGROUP, own_groups: Path = _OWN_GROUPS) -> int:
    """Returns the number of usable hardware threads: the affinity, limited by quotas of control groups; at least 1."""
    cpus = len(_affinity())
    quotas = [_words(folder / "cpu.max") for folder in _folders(cgroup, own_groups, "")]
    quotas += [
        [_word(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        for folder in _folders(cgroup, own_groups, "cpu")
    ]
    for words in quotas:
        if len(words) == 2 and all(map(str.isdigit, words)):  # otherwise "max", or -1 in version 1: no quota
            cpus = min(cpus, max(1, int(words[0]) // int(words[1])))
    return cpus


def _affinity() -> Collection[int]:
    """Returns the numbers of the hardware threads that this process may use. Only Linux lets others take some away."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


@contextlib.contextmanager
def returning_freed_matrices() -> Iterator[None]:
    """Makes the C library return the memory of freed matrices to the system at once, while a model loads.

    glibc raises the size from which it does so up to 32 MiB. Smaller matrices of a checkpoint would then leave holes
    between packed ones. Memory while Llama 3.2 1B (1.76 GB) is quantised from bf16 to int8: at most 1.82 GB, with a
    limit of 6 MiB 2.12 GB. That is the limit afterwards, so that activations are reused.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries may have none
    if set_option is None:
        yield
        return
    set_option(_M_MMAP_THRESHOLD, _MATRIX_BYTES)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, _ACTIVATIONS_BYTES)


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP, own_groups: Path = _OWN_GROUPS
) -> int:
    """Returns the memory available without swapping, limited by control groups. Page cache counts as free.

    Where the system does not say what is available, as macOS, it is half of the memory.
    """
    is_told = "SC_AVPHYS_PAGES" in os.sysconf_names
    pages = os.sysconf("SC_AVPHYS_PAGES") if is_told else os.sysconf("SC_PHYS_PAGES") // 2
    available = pages * os.sysconf("SC_PAGE_SIZE")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limits = [
        _limit(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "")
        for folder in _folders(cgroup, own_groups, "")
    ]
    limits += [  # version 1: without a limit it is a number of 19 digits
        _limit(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", folder / "memory.stat", "total_")
        for folder in _folders(cgroup, own_groups, "memory")
    ]
    for group in filter(None, limits):
        available = min(available, max(0, group.limit - group.used + group.cached))
    return available


def _folders(cgroup: Path, own_groups: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control group and of those around it, which limit it as well.

    A container mostly has one, at the top. Elsewhere, such as in a unit of systemd, the system says which one it is.
    That may be a path of the host, of which a container has no folder: what is not there is no limit.

    Args:
        cgroup: where the groups are.
        own_groups: the system's list of the groups of this process.
        controller: of version 1; empty: version 2.
    """
    lines = (line.split(":", 2) for line in _text(own_groups).splitlines())
    path = next((path for _, controllers, path in lines if controller in controllers.split(",")), "/")
    names = () if "/.." in path else PurePosixPath(path).parts[1:]  # .. is outside of the container's groups
    return [(cgroup / controller).joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _limit(limit: Path, used: Path, stat: Path, prefix: str) -> _Limit | None:
    """Reads a memory limit; None if there is none. Files of a tmpfs are in neither list and do not count as free."""
    limit_word, used_word = _word(limit), _word(used)
    if not limit_word.isdigit() or not used_word.isdigit():
        return None
    words = _words(stat)
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=False))
    num_cached = sum(counts.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))
    return _Limit(int(limit_word), int(used_word), num_cached)


def _word(path: Path) -> str:
    """Returns the first word of a file, or an empty string."""
    return (*_words(path), "")[0]


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
