"""The second process compiles the kernels of sampling once a kernel has to be compiled, and only then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import second_compiler
from kernels.cpu.second_compiler import SecondCompiler
from tests.hang import HANG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of the processes started; each prints two lines and waits for the end of its input."""
    started: list[str] = []
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        started.append(command[-1])
        code = "import sys; print('compiled\\ncompiled', flush=True); sys.stdin.close()"
        return real([sys.executable, "-c", code], **options)

    monkeypatch.setattr(second_compiler.subprocess, "Popen", popen)
    return started


def test_one_process_is_started_and_its_kernels_are_counted(commands: list[str]) -> None:
    with SecondCompiler(is_allowed=True) as second:
        assert second.num_compiled() == 0
        second.start()
        second.start()
        second.wait()
        assert (second.num_compiled(), second.num_compiled()) == (2, 2)
        second.start()
    assert commands == ["kernels.cpu.second_compiler"]


def test_no_process_is_started_without_a_compile_or_on_one_core(commands: list[str]) -> None:
    with SecondCompiler(is_allowed=True) as second:
        second.wait()
        second.start()  # too late: the sampler is next
    with SecondCompiler(is_allowed=False) as second:
        second.start()
        second.wait()
    assert commands == []


def test_an_interrupted_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    real = subprocess.Popen

    def popen(_command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        processes.append(real([sys.executable, "-c", "import sys; sys.stdin.read()"], **options))
        return processes[-1]

    monkeypatch.setattr(second_compiler.subprocess, "Popen", popen)

    with SecondCompiler(is_allowed=True) as second:
        second.start()  # and the wait never comes
    assert processes[0].returncode is not None


@pytest.mark.slow
def test_the_engine_loads_what_the_process_compiled(tmp_path: Path) -> None:
    code = (
        "import kernels.cpu.threads\n"
        "from kernels.cpu.jit import watch_compiles\n"
        "from kernels.cpu.sample import compile_sampler\n"
        "from kernels.cpu.second_compiler import SecondCompiler\n"
        "with SecondCompiler(is_allowed=True) as second:\n"
        "    second.start(); second.wait(); print(second.num_compiled() > 5)\n"
        "counted = []\n"
        "with watch_compiles(lambda *counts: counted.append(counts)):\n"
        "    compile_sampler()\n"
        "print(counted)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout == "True\n[]\n", done.stderr
