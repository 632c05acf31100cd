"""Compiled kernels are found again by content: any source, package or processor counts, times and paths do not."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core import config

from kernels.cpu import jit, kernel_cache, sample, worker_pool
from kernels.cpu.execute import ITEM_KERNELS, compile_items
from kernels.cpu.kernel_cache import MARKER, SUFFIX, cache_folder, kernel_sources
from tests.hang import HANG_S

ROOT = Path(__file__).parents[3]
HELPER = "from kernels.cpu.jit import kernel\nFACTOR = 2\n@kernel\ndef scaled(x: int) -> int:\n    return FACTOR * x\n"
CALLER = (
    "from kernels.cpu.helper import scaled\nfrom kernels.cpu.jit import kernel\n@kernel\ndef caller(x: int) -> int:\n"
    "    return scaled(x) + 1\n"
)
RUN = (
    "from kernels.cpu import jit, caller\ncounted = [(0, 0)]\n"
    "with jit.watch_compiles(lambda *counts: counted.append(counts)):\n    result = caller.caller(5)\n"
    "print(result, counted[-1][0])"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the kernels with two small ones, one of which calls the other in another file."""
    path = tmp_path / "checkout"
    shutil.copytree(ROOT / "kernels", path / "kernels", ignore=shutil.ignore_patterns("__pycache__", "gpu"))
    (path / "kernels" / "cpu" / "helper.py").write_text(HELPER)
    (path / "kernels" / "cpu" / "caller.py").write_text(CALLER)
    return path


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """start(checkout, **variables): a process that calls a kernel and prints its result and the number of compiles."""

    def start(checkout: Path, **variables: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", RUN]
        return subprocess.Popen(
            command, env={**environment, **variables}, stdout=subprocess.PIPE, text=True, cwd=checkout
        )

    return start


def printed(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=HANG_S)[0].strip()


def test_kernels_survive_a_moved_checkout_and_a_changed_helper_is_compiled(
    checkout: Path, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    assert printed(start(checkout)) == "11 2"
    moved = checkout.rename(tmp_path / "moved")
    for source in moved.rglob("*.py"):  # as of a fresh clone
        source.touch()
    assert printed(start(moved)) == "11 0"
    (moved / "kernels" / "cpu" / "helper.py").write_text(HELPER.replace("= 2", "= 0x3"))  # Python sees it by its size
    assert printed(start(moved)) == "16 2"


def test_each_processor_has_its_own_kernels(checkout: Path, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    assert printed(start(checkout)) == "11 2"
    assert printed(start(checkout, NUMBA_CPU_NAME="generic")) == "11 2"
    assert printed(start(checkout)) == "11 0"


def test_settings_of_numba_that_change_the_code_count(
    checkout: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    assert printed(start(checkout, NUMBA_LOOP_VECTORIZE="0")) == "11 2"
    assert printed(start(checkout)) == "11 2"
    assert printed(start(checkout, NUMBA_LOOP_VECTORIZE="0")) == "11 0"


def test_processes_that_start_together_share_a_folder(
    checkout: Path, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    results = [printed(process) for process in [start(checkout) for _ in range(3)]]
    assert [result.split()[0] for result in results] == ["11"] * 3
    assert len(list((tmp_path / "cache" / "chairlift").iterdir())) == 2
    assert printed(start(checkout)) == "11 0"


def test_every_module_of_the_kernels_counts() -> None:
    """Whatever a kernel can take a constant or a function from must change the names of files."""
    code = (
        "import sys, kernels.cpu.ops\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'kernels' and m.__file__), sep='\\n')"
    )
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S, cwd=ROOT).stdout
    sources = {str(source) for source in kernel_sources()}
    uncompiled = str(ROOT / "kernels" / "reference")  # PyTorch's operations
    assert {path for path in loaded.split() if not path.endswith("__init__.py") and uncompiled not in path} <= sources


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and no warnings yet."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_kernels", [])
    kernel_cache._warn_uncached.cache_clear()
    kernel_cache._prune.cache_clear()
    monkeypatch.setattr(kernel_cache, "_damaged_folders", set())
    return tmp_path / "chairlift"


def tripled() -> int:
    """Defines and calls two kernels as a start does; returns how many were compiled."""

    def triple(value: int) -> int:
        return 3 * value

    def negated(value: int) -> int:
        return -value

    first, second, counted = jit.kernel(triple), jit.kernel(negated), []
    with jit.watch_compiles(lambda done, total: counted.append(done)):
        assert (first(2), second(2)) == (6, -2)
    return len(counted)


@pytest.mark.parametrize("damage", [lambda data: data[:20], lambda data: b"", lambda data: data[:-1] + b"\0"])
def test_damaged_files_are_compiled_and_cached_again_with_one_warning(
    folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power failure during a write."""
    assert (tripled(), tripled()) == (2, 0)
    files = list(folder.glob(f"*{SUFFIX}"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    assert (tripled(), tripled()) == (2, 0)
    (record,) = caplog.records
    assert "recompiling CPU kernels whose files are damaged, the first is " in record.message
    assert record.message.split()[-1] in map(str, files)


@pytest.mark.parametrize("method", ["mkdir", "write_bytes", "read_bytes"])
def test_a_failing_disk_causes_one_warning_and_loses_no_kernel(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    if method == "write_bytes":
        monkeypatch.setattr("os.fdopen", fail)
    else:
        real = getattr(Path, method)
        monkeypatch.setattr(
            Path, method, lambda path, *a, **k: fail() if path.is_relative_to(folder) else real(path, *a, **k)
        )
    assert tripled() == 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"not cached, every start compiles them again: {folder}: No space left on device" in record.message
    assert "NUMBA_CACHE_DIR names another folder" in record.message
    assert not [path for path in folder.glob("*") if path.suffix != SUFFIX]


def test_kernels_of_an_image_need_no_readable_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as another user than the image's."""
    assert tripled() == 2
    monkeypatch.setattr(kernel_cache, "COMPILED", folder.rename(tmp_path / "image"))
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.is_relative_to(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert tripled() == 0
    assert caplog.messages == []


def test_kernels_compile_without_a_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder() is None
    assert tripled() == 2
    (record,) = caplog.records
    assert "there is no home folder; NUMBA_CACHE_DIR names another folder" in record.message


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "chairlift" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "chairlift" / "kernels"


def test_files_least_recently_used_are_deleted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_BYTES", 250)
    folder.mkdir()
    for used_s, name in enumerate(["oldest", "older", "old", "new"], start=1000):
        (folder / f"{name}{SUFFIX}").write_bytes(bytes(100))
        os.utime(folder / f"{name}{SUFFIX}", (used_s, used_s))
    (folder / "checked-0.txt").write_bytes(bytes(100))
    (folder / f"{MARKER}0").touch()  # which is not true any more
    assert tripled() == 2
    left = {path.name for path in folder.iterdir()}
    assert {f"old{SUFFIX}", f"new{SUFFIX}", "checked-0.txt"} < left
    assert not {f"oldest{SUFFIX}", f"older{SUFFIX}"} & left
    assert len(left) == 5


def test_files_that_a_killed_process_left_are_deleted(folder: Path) -> None:
    folder.mkdir()
    for name in ("left.tmp", "being-written.tmp"):
        (folder / name).write_bytes(bytes(100))
    os.utime(folder / "left.tmp", (1000, 1000))
    assert tripled() == 2
    assert {path.name for path in folder.glob("*.tmp")} == {"being-written.tmp"}


def test_a_loaded_kernel_counts_as_used(folder: Path) -> None:
    assert tripled() == 2
    files = list(folder.glob(f"*{SUFFIX}"))
    for file in files:
        os.utime(file, (1000, 1000))
    assert tripled() == 0
    assert min(file.stat().st_mtime for file in files) > 1000


def test_the_kernels_of_an_engine_can_be_kept() -> None:
    """One that holds an address of its process, such as of a function passed as an argument, is compiled every time."""
    worker_pool.compile_loop()
    sample.compile_sampler()
    compile_items()
    kernels: list[Any] = [
        *ITEM_KERNELS.values(),
        worker_pool._run,
        sample._sample_rows,
        sample._sample_rows_on_all_threads,
    ]
    compiled = [overload for kernel in kernels for overload in kernel.overloads.values()]
    assert len(compiled) >= len(kernels)
    assert [overload.fndesc.qualname for overload in compiled if overload.library.has_dynamic_globals] == []
