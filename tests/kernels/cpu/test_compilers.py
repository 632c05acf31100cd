"""Kernels of a first start are compiled in processes of their own, once for all that start together."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import compilers, kernel_cache
from kernels.cpu.compilers import PARTS, compile_parts, compiling_elsewhere
from kernels.cpu.jit import compile_for, kernel
from kernels.cpu.kernel_cache import KernelCache, compiling_missing
from tests.hang import HANG_S

ROOT = Path(__file__).parents[3]
FIRST_LAST_BITS = """
import sys
import torch
import kernels.cpu.threads
from kernels.cpu.ops import CpuOps
ops = CpuOps(num_threads=2, on_compiled=lambda done, total: print("compiled", done, "of", total, file=sys.stderr))
generator = torch.Generator().manual_seed(1)
x, residual = torch.randn(2, 37, 999, generator=generator)
weights = ops.pack_linear(torch.randn(257, 999, generator=generator), None)
weight = torch.randn(999, generator=generator)
normed, residual = ops.add_rms_norm(x, residual, weight, 1e-6, for_linear=True)
gated = ops.gate_and_mul(ops.linear(normed, weights)[:, :256].contiguous(), "silu_and_mul")
print(ops.rms_norm(residual, weight, 1e-6).double().sum().item().hex(), gated.double().sum().item().hex())
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Parts of the processes started; each prints two lines and ends."""
    started: list[list[str]] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        started.append(command[command.index("kernels.cpu.compilers") + 1 :])
        return real([sys.executable, "-c", "print('compiled\\ncompiled', flush=True)"], **options)

    monkeypatch.setattr(compilers.subprocess, "Popen", popen)
    return started


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Compiles a kernel that is not on the disk."""
    monkeypatch.setattr("kernels.cpu.kernel_cache.cache_folder", lambda: tmp_path / "kernels")

    def compile_one() -> None:
        @kernel
        def doubled(x: float) -> float:
            return x + x

        compile_for(doubled, 1.0)

    return compile_one


@pytest.mark.parametrize(
    ("num_processes", "parts"), [(1, [[*PARTS]]), (2, [["products", "attention"], ["steps", "sampling"]])]
)
def test_a_missing_kernel_has_all_compiled_once(
    commands: list[list[str]], missing: Callable[[], None], num_processes: int, parts: list[list[str]]
) -> None:
    counted: list[int] = []
    with compiling_elsewhere(num_processes, counted.append):
        missing()
        missing()
    assert commands == parts
    assert counted[-1] == 2 * num_processes
    missing()
    assert commands == parts


def test_nothing_is_started_where_nothing_can_be_kept(
    commands: list[list[str]], missing: Callable[[], None], tmp_path: Path
) -> None:
    (tmp_path / "kernels").write_text("in the way")
    with compiling_elsewhere(2, lambda _: None):
        missing()
    assert commands == []


def test_what_another_process_has_compiled_meanwhile_is_loaded(
    monkeypatch: pytest.MonkeyPatch, missing: Callable[[], None]
) -> None:
    """The lock is taken when the other process has gone: the kernel is there then."""
    calls: list[str] = []
    found = iter([None, b"there"])
    monkeypatch.setattr("kernels.cpu.kernel_cache._find", lambda _: next(found))
    monkeypatch.setattr("kernels.cpu.kernel_cache.pickle.loads", lambda data: (data,))
    monkeypatch.setattr("kernels.cpu.kernel_cache._rebuild", lambda _, data: data)
    monkeypatch.setattr(KernelCache, "_file_name", lambda *_: "name")

    class Target:
        def refresh(self) -> None:
            pass

        def codegen(self) -> None:
            pass

    with compiling_missing(lambda: calls.append("compiled")):
        assert KernelCache(missing).load_overload("()", Target()) == b"there"
    assert calls == []


def test_several_may_compile_where_files_cannot_be_locked(
    commands: list[list[str]], missing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("kernels.cpu.kernel_cache.fcntl.flock", no_locks)
    with compiling_elsewhere(1, lambda _: None):
        missing()
    assert commands == [[*PARTS]]


def test_a_process_that_is_stopped_while_it_compiles_does_not_stop_others(
    commands: list[list[str]],
    missing: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As by Ctrl-Z in a terminal: it keeps its lock."""
    caplog.set_level("INFO")
    monkeypatch.setattr(kernel_cache, "_COMPILE_S", 2)
    monkeypatch.setattr(kernel_cache.time, "sleep", lambda _: None)
    (tmp_path / "kernels").mkdir()
    with (tmp_path / "kernels" / "compiling.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with compiling_elsewhere(1, lambda _: None):
            missing()
    assert commands == [[*PARTS]]
    assert caplog.messages == [
        f"waiting for another process, which compiles CPU kernels into {tmp_path / 'kernels'}",
        "another process has not compiled the CPU kernels in 2 s: compiling them too",
    ]


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, failing = subprocess.Popen, [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(compilers.subprocess, "Popen", lambda _, **options: real(failing, **options))
    compile_parts([PARTS], lambda _: None)
    assert caplog.messages == ["a process that compiles CPU kernels ended with status 3: compiling here"]


def test_a_machine_that_starts_no_process_compiles_here(
    monkeypatch: pytest.MonkeyPatch, missing: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(compilers.subprocess, "Popen", popen)
    with compiling_elsewhere(2, lambda _: None):
        missing()
    assert "can be started: [Errno 12] Cannot allocate memory; compiling here" in caplog.text


def test_nothing_is_imported_from_the_current_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(entry for entry in sys.path if entry)])
    compile_parts([()], lambda _: None)
    assert caplog.messages == []


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    real = subprocess.Popen

    def popen(_command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        code = "import sys; print(flush=True); sys.stdin.read()"
        processes.append(real([sys.executable, "-c", code], **options))
        return processes[-1]

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compilers.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        compile_parts([("steps",), ("sampling",)], interrupt)
    assert [process.returncode is not None for process in processes] == [True, True]


@pytest.mark.slow
def test_the_first_start_computes_the_bits_of_the_next(tmp_path: Path) -> None:
    """A process that compiles links other code than one that loads: see `kernels.cpu.compilers`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    starts = [
        subprocess.run(
            [sys.executable, "-c", FIRST_LAST_BITS],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        for _ in range(2)
    ]
    assert starts[0].stdout == starts[1].stdout != "", starts[0].stderr
    lines = starts[0].stderr.splitlines()
    assert len(lines) > 5
    assert starts[1].stderr == ""
