"""A model from the cache of packed weights is the model that was packed, in every format, and reads only what is not
packed.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.loader import cpu_checkpoint_dtype, load_model, resolve_dtype
from engine.model.packed_cache import PackedCache, PackedWeights
from engine.model.packed_file import write_packed
from engine.model.weights import WeightsReader
from kernels.cpu.experts import PackedExperts
from kernels.families import cpu_ops, reference_ops
from kernels.interface import KernelOps
from tests.support.engine.float_checkpoints import quantise_floats
from tests.support.engine.gguf import save_random_blocks
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.mxfp4_checkpoints import quantise_experts


def int8_ops() -> KernelOps:
    return cpu_ops(quantization="int8")


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """checkpoint(form) -> a checkpoint of this form."""

    def make(form: str) -> Path:
        copy, twin = tmp_path / "copy", tmp_path / "twin"
        if form == "integers":
            original = make_checkpoint("llama", dtype="float16", hidden_size=64, intermediate_size=128, head_dim=16)
            for folder in (copy, twin):
                shutil.copytree(original, folder)
            quantise_checkpoint(original, copy, twin, Scheme("gptq", group_size=16, shuffled=True))
            return copy
        if form == "NVFP4":
            original = make_checkpoint("qwen3_moe", dtype="bfloat16", hidden_size=64, moe_intermediate_size=64)
            for folder in (copy, twin):
                shutil.copytree(original, folder)
            quantise_floats(original, copy, twin, "modelopt")
            return copy
        if form == "MXFP4":
            original = make_checkpoint("gpt_oss", dtype="bfloat16", intermediate_size=128)
            for folder in (copy, twin):
                shutil.copytree(original, folder)
            quantise_experts(original, copy, twin)
            return copy
        if form == "GGUF":
            file = tmp_path / "model.gguf"
            sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
            save_random_blocks(make_checkpoint("llama", **sizes), file, {"attn": "Q6_K", "ffn": "Q5_K"}, "Q8_0")
            return file
        architecture, dtype, is_tied = {
            "tied bf16": ("llama", "bfloat16", True),
            "untied fp16": ("llama", "float16", False),
            "scaled fp32": ("gemma3", "float32", True),
            "experts": ("mixtral", "bfloat16", False),
            "shared expert": ("qwen2_moe", "bfloat16", False),
        }[form]
        return make_checkpoint(architecture, dtype=dtype, tie_word_embeddings=is_tied)

    return make


def packed_parts(model: Decoder, path: Path) -> bytes:
    """Returns everything that is packed, as the bytes of a file."""
    mixtures = [getattr(layer.feed_forward, "_mixture", layer.feed_forward) for layer in model.layers]
    experts = [_without_addresses(getattr(mixture, "_experts", None)) for mixture in mixtures]
    layers = [linear._packed for layer in model.layers for linear in layer.linears]
    with path.open("w+b") as file:
        write_packed(
            file,
            {"head": (model.vocabulary.table, model.vocabulary._packed_head), "layers": layers, "experts": experts},
        )
    return path.read_bytes()


def _without_addresses(experts: Any) -> Any:
    """Returns the weights of packed experts, of which a CPU lays out instructions too."""
    if not isinstance(experts, PackedExperts):
        return experts
    return experts.router, experts.gate_up.layers, experts.down.layers


@pytest.mark.parametrize("make_ops", [cpu_ops, int8_ops, reference_ops])
@pytest.mark.parametrize(
    "form",
    ["tied bf16", "untied fp16", "scaled fp32", "experts", "shared expert", "integers", "MXFP4", "NVFP4", "GGUF"],
)
def test_a_model_from_the_cache_is_the_one_that_was_packed(
    checkpoint: Callable[[str], Path],
    form: str,
    make_ops: Callable[[], KernelOps],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = checkpoint(form)
    config = ModelConfig.from_dir(path)
    dtype = resolve_dtype("auto", cpu_checkpoint_dtype(path, config))
    cache = PackedCache(tmp_path / "cache", 10**9, lambda: "key")
    threads: list[threading.Thread] = []
    save = PackedWeights.save

    def save_and_wait(self: PackedWeights) -> None:
        if (thread := save(self)) is not None:
            thread.join()
            threads.append(thread)

    monkeypatch.setattr(PackedWeights, "save", save_and_wait)
    read: list[str] = []
    fill = WeightsReader.fill

    def fill_and_note(self: WeightsReader, parts: dict[str, Any]) -> None:
        read.extend(parts)
        fill(self, parts)

    monkeypatch.setattr(WeightsReader, "fill", fill_and_note)

    def load(packed_cache: PackedCache | None) -> bytes:
        read.clear()
        model = load_model(path, config, make_ops(), dtype=dtype, packed_cache=packed_cache)
        return packed_parts(model, tmp_path / "parts")

    anew = load(None)
    assert any("proj" in name for name in read)
    assert load(cache) == anew
    assert any("proj" in name for name in read)
    assert load(cache) == anew
    assert read
    assert [name for name in read if not any(part in name for part in ("norm", "sinks", "router", "gate"))] == []
    assert not any("proj" in name for name in read)
    assert len(threads) == 1
