"""The check on a GPU runs on a bare machine, with PyTorch, Triton, NumPy, transformers, gRPC and pytest."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.bench.gpu.stages import Rehearsal, commands_of
from tests.support.packages import hidden_modules, hiding, requirements

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = ("torch", "triton", "numpy", "transformers", "grpcio", "protobuf", "pytest", "pytest-timeout")
OURS = ("chairlift", "engine", "frontend", "kernels", "loadgen")


# The engine of a rehearsed pair runs its CPU kernels, which need numba; `loadgen` has its own requirements.
PAIR_ALSO = ("numba", "aiohttp", "rich", "matplotlib", "llguidance")
CARRIED = ("grpc_health", "grpc_reflection", "grpc_status", "prometheus_client")


def environ_without(folder: Path, *installed: str) -> dict[str, str]:
    """Environment in which all processes, children included, find only these distributions and what they need."""
    allowed: set[str] = set()
    for name in installed:
        requirements(name, "", allowed)
    (folder / "sitecustomize.py").write_text(hiding(hidden_modules(allowed) - set(OURS)))
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "protos")))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return {**environ, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def bare_environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environ_without(tmp_path_factory.mktemp("hide"), *INSTALLED)


def run_python(environ: dict[str, str], *arguments: str) -> str:
    """Returns what it prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rehearse(environ: dict[str, str], out: Path, *stage: str) -> dict:
    """Returns the report of a stage."""
    flags = ["--device", "cpu", "--shape", "tiny", "--quick", "--threads", "1", "--out", str(out)]
    run_python(environ, "-m", "engine.bench", "gpu-check", *stage, *flags)
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


def test_what_a_bare_machine_lacks_is_hidden(bare_environ: dict[str, str]) -> None:
    names = ["numba", "llvmlite", "llguidance", "aiohttp", "matplotlib", *CARRIED]
    program = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    assert run_python(bare_environ, "-c", program) == "[]\n"


def test_benchmarks_are_listed_and_every_stage_is_imported(bare_environ: dict[str, str]) -> None:
    assert "gpu-check" in run_python(bare_environ, "-m", "engine.bench", "list")
    modules = ("check", "decode", "invariance", "judge", "mix", "pair", "peers")
    run_python(bare_environ, "-c", "import " + ", ".join(f"engine.bench.gpu_{name}" for name in modules))


def test_all_tests_of_kernels_and_engines_are_collected(bare_environ: dict[str, str]) -> None:
    tests, _ = commands_of("kernels", Rehearsal(), (), num_processes=1, seed=0)
    environ = bare_environ | {name: value for name, value in tests.environ if value}
    collected = run_python(environ, *tests.arguments, "--collect-only", "-W", "error::pytest.PytestUnknownMarkWarning")
    assert re.search(r"\d{3,} tests collected", collected)
    assert "test_gpu_serving.py" in collected


def test_whole_model_is_judged(bare_environ: dict[str, str], tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--quick", "--threads", "1", "--out", str(tmp_path)]
    assert "5 of 5 ids" in run_python(bare_environ, "-m", "engine.bench", "gpu-judge", *flags)


@pytest.mark.slow
def test_first_contact_is_rehearsed(bare_environ: dict[str, str], tmp_path: Path) -> None:
    report = rehearse(bare_environ, tmp_path, "--first-contact")
    judged = [result["what"].rpartition(", ")[2] for result in report["results"] if "transformers" in result["what"]]
    assert judged == ["eager", "graphs", "in-flight", "alone"]
    steps = [result for result in report["results"] if "decode step" in result["what"]]
    assert len(steps) == 2
    assert all("bf16" in result["what"] and result["floor"] > 0 for result in steps)
    (table,) = tmp_path.glob("gpu-first-contact-*.md")
    assert "versions: " in table.read_text()
    assert "- tests: " in table.read_text()
    assert "Could not run" not in table.read_text()


@pytest.mark.slow
def test_kernels_are_rehearsed(bare_environ: dict[str, str], tmp_path: Path) -> None:
    assert rehearse(bare_environ, tmp_path, "--stage", "kernels", "--extra=--only pointwise,delta")["results"]


@pytest.mark.slow
def test_decode_steps_are_rehearsed_in_fp8(bare_environ: dict[str, str], tmp_path: Path) -> None:
    """The first contact has those in bf16."""
    report = rehearse(bare_environ, tmp_path, "--stage", "decode", "--extra=--precision fp8")
    assert len(report["results"]) == 3
    assert all("fp8" in result["what"] for result in report["results"])
    assert all(result["floor"] > 0 for result in report["results"])
    (table,) = tmp_path.glob("gpu-decode-*.md")
    assert table.read_text().startswith("| id | what | figure | goal | floor | fraction |")
    assert "command of gpu-decode" in report["raw"]


@pytest.mark.slow
def test_a_mix_is_rehearsed_with_continuous_and_static_batches(bare_environ: dict[str, str], tmp_path: Path) -> None:
    report = rehearse(bare_environ, tmp_path, "--stage", "mix")
    assert [result["what"].partition(",")[0] for result in report["results"]] == ["3/3", "sharegpt", "sharegpt"]
    assert "x the fraction of equal lengths" in report["results"][1]["note"]
    assert "static" in report["results"][2]["what"]
    assert all(result["figure"] > 0 for result in report["results"])


@pytest.mark.slow
def test_peers_are_rehearsed_with_the_same_requests(bare_environ: dict[str, str], tmp_path: Path) -> None:
    report = rehearse(bare_environ, tmp_path, "--stage", "peers")
    ratios = [result for result in report["results"] if result["unit"] == "x"]
    assert len(ratios) == 2
    assert all(ratio["figure"] > 0 for ratio in ratios)
    assert report["results"][0]["figure"] > 99


@pytest.mark.slow
def test_pair_is_rehearsed_with_carried_wheels(tmp_path: Path) -> None:
    environ = environ_without(tmp_path, *INSTALLED, *PAIR_ALSO)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in CARRIED:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for path in folder.rglob("*.py"):
                archive.write(path, path.relative_to(folder.parent))
    report = rehearse({**environ, "CHAIRLIFT_WHEELS": str(wheels)}, tmp_path / "out", "--stage", "pair")
    whats = [result["what"] for result in report["results"]]
    assert len(whats) == 8
    assert sum("Poisson" in what for what in whats) == 4
