"""Limits of the machine and of the control group: the smaller one counts."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.startup.machine import available_memory_bytes, usable_cores, usable_cpus
from tests.hang import HANG_S


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", None), ("50000 100000", 1), ("100000 100000", 1)])
def test_a_cpu_quota_cuts_the_threads(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cpus(tmp_path) == (cpus or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Six of the hardware threads of a CPU with four cores of two; the quota counts hardware threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 4, 5, 6})
    assert usable_cores(tmp_path, tmp_path) == 6  # nothing is known of the cores
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / name).write_text(f"{number % 4},{number % 4 + 4}\n")
    assert usable_cores(tmp_path, tmp_path) == 3
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert usable_cores(tmp_path, tmp_path) == 2


def test_without_a_control_group_the_machine_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 2048 * 1024
    assert usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("limit", "used", "free"), [("max", "5", 2**21), ("3000", "1000", 2000), ("1000", "3000", 0)])
def test_a_memory_limit_cuts_what_is_free(tmp_path: Path, limit: str, used: str, free: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 2048 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert available_memory_bytes(meminfo, tmp_path) == free


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    """Otherwise a restarted engine would count the page cache with the weights as used memory."""
    (tmp_path / "memory.max").write_text("3000")
    (tmp_path / "memory.current").write_text("2900")
    (tmp_path / "memory.stat").write_text("anon 900\nfile 2000\nshmem 0\ninactive_file 1500\nactive_file 500\n")
    assert available_memory_bytes(tmp_path / "none", tmp_path) == 3000 - 900


def test_without_meminfo_something_is_free(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path) > 0


def test_systems_that_tell_less_than_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS: no affinity, and nothing about available memory."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")
    assert usable_cores(tmp_path, tmp_path) == usable_cpus(tmp_path) == 3
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0.49 * total < available_memory_bytes(tmp_path / "none", tmp_path) <= 0.5 * total


@pytest.mark.parametrize(("quota", "cpus"), [("-1", None), ("50000", 1), ("100000", 1)])
def test_a_cpu_quota_of_version_1_cuts_the_threads(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == (cpus or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("limit", "free"), [("9223372036854771712", 2**21), ("200000000", 2**21), ("3000", 2100)])
def test_a_memory_limit_of_version_1_cuts_what_is_free(tmp_path: Path, limit: str, free: int) -> None:
    """As a container sees it on a host with control groups of version 1; children count, as in the usage."""
    meminfo, memory = tmp_path / "meminfo", tmp_path / "memory"
    meminfo.write_text("MemAvailable: 2048 kB\n")
    memory.mkdir()
    (memory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (memory / "memory.usage_in_bytes").write_text("2900\n")
    (memory / "memory.stat").write_text("cache 9\ninactive_file 7\ntotal_inactive_file 1500\ntotal_active_file 500\n")
    assert available_memory_bytes(meminfo, tmp_path) == free


@pytest.fixture
def own_groups(tmp_path: Path) -> Path:
    """A process in a unit of systemd, by version 2 and 1, and in a group of version 1 that its container lacks."""
    own_groups = tmp_path / "own_groups"
    own_groups.write_text(
        "9:memory:/system.slice/engine.service\n4:cpu,cpuacct:/docker/9f\n0::/system.slice/engine.service\n"
    )
    return own_groups


@pytest.mark.parametrize("group", ["", "system.slice", "system.slice/engine.service"])
def test_limits_of_the_own_group_and_of_those_around_it_count(tmp_path: Path, own_groups: Path, group: str) -> None:
    """As under systemd with CPUQuota and MemoryMax, where the group at the top has no limits."""
    folder = tmp_path / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text("100000 100000\n")
    (folder / "memory.max").write_text("3000\n")
    (folder / "memory.current").write_text("1000\n")
    assert usable_cores(tmp_path, tmp_path, own_groups) == usable_cpus(tmp_path, own_groups) == 1
    assert available_memory_bytes(tmp_path / "none", tmp_path, own_groups) == 2000


def test_groups_of_version_1_are_found_by_their_controllers(tmp_path: Path, own_groups: Path) -> None:
    memory, cpu = tmp_path / "memory" / "system.slice" / "engine.service", tmp_path / "cpu"
    for folder in (memory, cpu):
        folder.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("3000\n")
    (memory / "memory.usage_in_bytes").write_text("1000\n")
    (cpu / "cpu.cfs_quota_us").write_text("100000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert available_memory_bytes(tmp_path / "none", tmp_path, own_groups) == 2000
    assert usable_cpus(tmp_path, own_groups) == 1


def test_a_group_outside_of_the_container_is_not_looked_for(tmp_path: Path) -> None:
    own_groups, top = tmp_path / "own_groups", tmp_path / "top"
    own_groups.write_text("0::/../engine\n")
    for folder in (tmp_path / "engine", top):
        folder.mkdir()
        (folder / "cpu.max").write_text("max 100000\n" if folder == top else "100000 100000\n")
    assert usable_cpus(top, own_groups) == len(os.sched_getaffinity(0))


HEAP = """
import ctypes
from engine.startup.machine import returning_freed_matrices
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # from now on glibc keeps blocks of 30 MiB
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd u f uord ford keep".split()]
libc.mallinfo2.restype = Info
def is_mapped(num_bytes):
    before = libc.mallinfo2().hblks
    libc.malloc(num_bytes)
    return libc.mallinfo2().hblks - before
print(is_mapped(8 << 20))
with returning_freed_matrices():
    print(is_mapped(1 << 20))
print(is_mapped(1 << 20), is_mapped(8 << 20))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="of glibc since 2.33")
def test_a_matrix_gets_memory_that_is_returned_when_it_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "0\n1\n0 1\n", done.stderr
