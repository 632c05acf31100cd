"""The check on a GPU runs on a bare machine, with PyTorch, Triton, NumPy, transformers, gRPC and pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import hidden_modules, hiding, requirements

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = ("torch", "triton", "numpy", "transformers", "grpcio", "protobuf", "pytest", "pytest-timeout")
OURS = ("chairlift", "engine", "frontend", "kernels", "loadgen")


@pytest.fixture(scope="module")
def bare_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which all processes, children included, find no other packages."""
    allowed: set[str] = set()
    for name in INSTALLED:
        requirements(name, "", allowed)
    hidden = hidden_modules(allowed) - set(OURS)
    assert {"numba", "llvmlite", "llguidance", "grpc_health", "grpc_status", "prometheus_client", "aiohttp"} <= hidden
    folder = tmp_path_factory.mktemp("hide")
    (folder / "sitecustomize.py").write_text(hiding(hidden))
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "protos")))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run_bench(environ: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_nothing_else_can_be_imported(bare_environ: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import torch, grpc; import numba"]
    done = subprocess.run(command, env=bare_environ, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'numba'"


def test_benchmarks_and_stages_are_listed(bare_environ: dict[str, str], tmp_path: Path) -> None:
    for arguments in (["list"], ["gpu-check"]):
        done = run_bench(bare_environ, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        assert "decode" in done.stdout


def test_every_stage_is_imported(bare_environ: dict[str, str]) -> None:
    modules = ("gpu_decode", "gpu_mix", "gpu_pair", "gpu_peers")
    program = "import " + ", ".join(f"engine.bench.{name}" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", program], env=bare_environ, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
