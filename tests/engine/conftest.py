"""Fixtures of tests with a real model: tiny random checkpoints, saved by `transformers`, and GPU operations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine.checkpoints import save_checkpoint

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """make_checkpoint(architecture, *, seed=0, dtype="float32", max_shard_size="1GB", **config_overrides) -> folder.

    `architecture` is a key of `ARCHITECTURES`; overrides are fields of the transformers config. Equal calls share
    one folder: a test that breaks a checkpoint copies it first.
    """
    made: dict[str, Path] = {}

    def make(
        architecture: str, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
    ) -> Path:
        key = repr((architecture, seed, dtype, max_shard_size, sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            save_checkpoint(path, architecture, seed=seed, dtype=dtype, max_shard_size=max_shard_size, **overrides)
            made[key] = path
        return made[key]

    return make


@pytest.fixture(scope="session")
def servable(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Returns `make_checkpoint` with a tokenizer.json in each folder, which engines require."""

    def make(architecture: str = "llama", **options: Any) -> Path:
        path = tmp_path_factory.mktemp("servable") / f"tiny-{architecture}"
        shutil.copytree(make_checkpoint(architecture, **options), path)
        (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        return path

    return make


@pytest.fixture(scope="module")
def model_dir(servable: MakeCheckpoint) -> Path:
    """A servable model of one layer."""
    return servable(num_hidden_layers=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A simulated GPU; see `simulate_gpu`."""
    import torch

    from tests.support.engine.simulated_gpu import simulate_gpu

    if torch.cuda.is_available():
        pytest.skip("kernels are not interpreted beside a GPU: hide it with CUDA_VISIBLE_DEVICES=")
    return simulate_gpu(monkeypatch)


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends a stream without waiting for the acknowledgement of the last messages."""
    from engine.serving.outgoing import Outgoing

    monkeypatch.setattr(Outgoing.close, "__defaults__", (0.0,))


@pytest.fixture(scope="session")
def gpu_device() -> Any:
    """Device of `gpu_ops`: the GPU, or without one the CPU, where Triton's interpreter runs the kernels."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def gpu_ops(gpu_device: Any) -> Callable[..., Any]:
    """gpu_ops(**options) -> GpuOps; under the interpreter for a target with every feature."""
    from kernels.gpu.ops import GpuOps
    from kernels.gpu.targets import TARGETS, target_of
    from tests.support.kernels.interpreter import patch_language_once_per_launch

    patch_language_once_per_launch()
    target = target_of(gpu_device) if gpu_device.type == "cuda" else TARGETS["sm_90"]
    return lambda **options: GpuOps(gpu_device, target, num_processors=132, **options)
