"""A start uses the highest level that the CPU has and the image carries; any CPU can compile for all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

from kernels.cpu import compile_ahead, cpu_levels
from kernels.cpu.cpu_features import ByteProducts, CpuFeatures, cpu_features
from kernels.cpu.cpu_levels import LEVELS, CpuLevel, target, use_compiled_level
from kernels.cpu.kernel_cache import SUFFIX
from tests.hang import HANG_S, START_HANG_S

ROOT = Path(__file__).parents[3]
NAMES = list(LEVELS)
FEATURES = {
    "x86-64-v3": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX2, fp16=True, bf16=False),
    "x86-64-v3-vnni": CpuFeatures(avx512=False, byte_products=ByteProducts.AVX_VNNI, fp16=True, bf16=False),
    "x86-64-v4": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512, fp16=True, bf16=False),
    "x86-64-v4-vnni": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512_VNNI, fp16=True, bf16=False),
    "x86-64-v4-bf16": CpuFeatures(avx512=True, byte_products=ByteProducts.AVX512_VNNI, fp16=True, bf16=True),
}


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an image with the kernels of all levels, on a CPU that has them all."""
    folder, cache = tmp_path / "image", tmp_path / "cache"
    for path in (folder, cache):
        path.mkdir()
    for level in LEVELS.values():
        level.marker(folder).touch()
    monkeypatch.setattr(cpu_levels, "COMPILED", folder)
    monkeypatch.setattr(cpu_levels, "cache_folder", lambda: cache)
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(numba.config, name, None)
    has_features(monkeypatch, LEVELS[NAMES[-1]].features)
    return folder


def has_features(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    monkeypatch.setattr("kernels.cpu.cpu_features.host_features", lambda: f"{features},+sse,-avx512fp16")


def configured() -> CpuLevel:
    config: Any = numba.config
    return CpuLevel(config.CPU_NAME, config.CPU_FEATURES)


@pytest.mark.parametrize("name", NAMES)
def test_the_highest_level_that_the_cpu_has_is_used(name: str, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_features(monkeypatch, LEVELS[name].features)
    assert use_compiled_level() == name
    assert configured() == target() == LEVELS[name]
    assert cpu_features.__wrapped__() == FEATURES[name]


def test_a_level_that_the_image_lacks_is_not_used(image: Path) -> None:
    LEVELS[NAMES[-1]].marker(image).unlink()
    assert use_compiled_level() == NAMES[-2]


@pytest.mark.parametrize("reason", ["no image", "old CPU", "compiled for this CPU", "variables", "other sources"])
def test_otherwise_kernels_are_those_of_this_cpu(reason: str, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no image":
        shutil.rmtree(image)
    elif reason == "old CPU":
        has_features(monkeypatch, "+sse4.2,+avx")
    elif reason == "compiled for this CPU":
        target().marker(image.parent / "cache").touch()
    elif reason == "variables":
        monkeypatch.setattr(numba.config, "CPU_NAME", "znver2")
    else:
        monkeypatch.setattr(cpu_levels, "environment_digest", lambda *_: "0")
    before = configured()
    assert use_compiled_level() is None
    assert configured() == before


def test_a_cache_that_this_user_cannot_read_has_nothing(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def raises(path: Path) -> bool:
        if path.is_relative_to(image.parent / "cache"):
            raise PermissionError(f"Permission denied: {path}")
        return exists(path)

    monkeypatch.setattr(Path, "exists", raises)
    assert use_compiled_level() == NAMES[-1]


def test_levels_contain_lower_ones_but_for_avx_vnni() -> None:
    levels = list(LEVELS.values())
    assert [[higher.runs_with(lower.features) for lower in levels] for higher in levels] == [
        [True, True, True, True, True],
        [False, True, False, False, False],
        [False, False, True, True, True],
        [False, False, False, True, True],
        [False, False, False, False, True],
    ]


COMPILE = """
import numpy as np
from kernels.cpu.jit import compile_for, kernel
@kernel
def halves(x):
    for i in range(len(x)):
        x[i] *= np.float32(0.5)
compile_for(halves, np.zeros(64, dtype=np.float32))
[assembly] = halves.inspect_asm().values()
print("zmm" in assembly)
"""


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4"])
def test_compiling_for_a_level_uses_its_vectors(name: str, tmp_path: Path) -> None:
    """On any CPU: one without AVX-512 compiles for it too."""
    source = tmp_path / "halves.py"
    source.write_text(COMPILE)
    variables = {**LEVELS[name].variables(), "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(source)], env=os.environ | variables, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.split() == [str(name == "x86-64-v4")], done.stderr


def test_compiling_for_this_cpu_leaves_the_folder_of_an_image_alone(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to root there, and its file system is read-only."""
    paths = [image, *image.iterdir()]
    for path in paths:
        path.chmod(0o500)
    monkeypatch.setattr(compile_ahead, "COMPILED", image)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))  # in place of the process that compiles
    assert compile_ahead.main(["native"]) == 0
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o500}


@pytest.mark.slow
@pytest.mark.timeout(2 * START_HANG_S)
def test_an_image_that_was_compiled_elsewhere_compiles_nothing_at_its_start(tmp_path: Path) -> None:
    checkout, kernels = tmp_path / "checkout", tmp_path / "checkout" / "kernels" / "cpu"
    shutil.copytree(ROOT / "kernels", checkout / "kernels", ignore=shutil.ignore_patterns("__pycache__", "gpu"))
    environment = {**os.environ, "PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "kernels.cpu.compile_ahead", "x86-64-v3"]
    subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=START_HANG_S)
    compiled = kernels / "compiled" / "chairlift"
    assert {file.stat().st_mode & 0o777 for file in compiled.glob(f"*{SUFFIX}")} == {0o644}
    assert compiled.stat().st_mode & 0o777 == 0o755
    start = (
        "from kernels.cpu.cpu_levels import use_compiled_level\nprint(use_compiled_level())\n"
        "from kernels.cpu.ops import CpuOps\nCpuOps(on_compiled=lambda *_: print('compiled'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=checkout, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.split() == ["x86-64-v3"], done.stderr
    assert not (tmp_path / "cache").exists()
