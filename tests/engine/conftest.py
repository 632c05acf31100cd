"""Fixtures of tests with a real model: tiny random checkpoints, saved by `transformers`, and GPU operations."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeCheckpoint = Callable[..., Path]

_SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
}


def _save_checkpoint(
    path: Path, architecture: str, *, seed: int, dtype: str, max_shard_size: str, **overrides: Any
) -> None:
    import torch
    import transformers

    config_class, model_class, defaults = _ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**{**_SMALL, **defaults, **overrides})
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:  # around one, so that a forgotten norm weight shows
            values = 1 + 0.2 * noise
        elif parameter.ndim == 1:  # biases that matter
            values = 0.2 * noise
        else:  # keeps activations and logits near unit scale
            values = noise * parameter.shape[1] ** -0.5
        parameter.data.copy_(values)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """make_checkpoint(architecture, *, seed=0, dtype="float32", max_shard_size="1GB", **config_overrides) -> folder.

    `architecture` is a key of `_ARCHITECTURES`; overrides are fields of the transformers config. Equal calls share
    one folder: a test that breaks a checkpoint copies it first.
    """
    made: dict[str, Path] = {}

    def make(
        architecture: str, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
    ) -> Path:
        key = repr((architecture, seed, dtype, max_shard_size, sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            _save_checkpoint(path, architecture, seed=seed, dtype=dtype, max_shard_size=max_shard_size, **overrides)
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
