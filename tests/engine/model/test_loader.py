"""Which dtype is served where, and the memory that loading takes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.loader import cpu_checkpoint_dtype, resolve_dtype, weights_bytes
from engine.model.shapes import find_shape
from engine.model.transformers_probe import TransformersConfig
from kernels.families import cpu_ops
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS
from tests.support.engine.weights import PeakBytes


@pytest.fixture
def config(make_checkpoint):
    return ModelConfig.from_dir(make_checkpoint("llama", dtype="bfloat16"))


def test_auto_is_the_dtype_of_the_checkpoint_unless_operations_take_fp32_only(config):
    assert resolve_dtype("auto", config.checkpoint_dtype) is torch.bfloat16
    assert resolve_dtype("auto", config.checkpoint_dtype, is_fp32_only=True) is torch.float32
    assert resolve_dtype("float32", config.checkpoint_dtype) is torch.float32


@pytest.mark.parametrize("model_impl", [ModelConfig, TransformersConfig])
def test_the_largest_matrix_tells_the_dtype_if_config_json_does_not(make_checkpoint, tmp_path, model_impl):
    """As of gpt-oss, which a GPU would serve in float32 otherwise."""
    for dtype in ("bfloat16", "float16", "float32"):
        path = shutil.copytree(make_checkpoint("llama", dtype=dtype), tmp_path / dtype)
        values = json.loads((path / "config.json").read_text())
        del values["dtype"]
        (path / "config.json").write_text(json.dumps(values))
        tensors = load_file(path / "model.safetensors")
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].float()}, path / "model.safetensors")
        assert model_impl.from_dir(path).shape.checkpoint_dtype == dtype
    (path / "model.safetensors").unlink()
    assert model_impl.from_dir(path).shape.checkpoint_dtype == "float32"


def test_a_cpu_stores_weights_in_the_dtype_that_all_tensors_have_in_the_files(make_checkpoint, tmp_path):
    """So that nothing is rounded: config.json may name another dtype, and some tensors may be wider."""
    for dtype in ("bfloat16", "float16", "float32"):
        path = make_checkpoint("llama", dtype=dtype)
        config = replace(ModelConfig.from_dir(path), checkpoint_dtype="bfloat16")
        assert cpu_checkpoint_dtype(path, config) == dtype
    assert cpu_checkpoint_dtype(None, config) == "bfloat16"
    assert cpu_checkpoint_dtype(None, replace(config, quantized=Fp8Weights(()))) == "float32"
    mixed = shutil.copytree(make_checkpoint("llama", dtype="bfloat16"), tmp_path / "mixed")
    tensors = load_file(mixed / "model.safetensors")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # not read
    save_file(tensors | frequencies, mixed / "model.safetensors")
    assert cpu_checkpoint_dtype(mixed, config) == "bfloat16"
    norm = "model.norm.weight"
    for matrix in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        save_file(tensors | {matrix: tensors[matrix].float()}, mixed / "model.safetensors")
        assert cpu_checkpoint_dtype(mixed, config) == "float32"
    save_file(tensors | {norm: tensors[norm].float()}, mixed / "model.safetensors")
    assert cpu_checkpoint_dtype(mixed, config) == "bfloat16", "which holds its numbers"
    save_file(tensors | {norm: tensors[norm].float() * (1 + 2**-20)}, mixed / "model.safetensors")
    assert cpu_checkpoint_dtype(mixed, config) == "float32"
    save_file(tensors | {norm: tensors[norm].half()}, mixed / "model.safetensors")
    assert cpu_checkpoint_dtype(mixed, config) == "float32"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((f"linear_attn.{name}", "bfloat16") for name in ("A_log", "dt_bias", "norm.weight", "conv1d.weight")),
        ("linear_attn.out_proj.weight", "float32"),
        ("mlp.shared_expert_gate.weight", "bfloat16"),
        ("mlp.gate.weight", "float32"),
    ],
)
def test_what_layers_keep_in_float32_does_not_decide(make_checkpoint, tmp_path, name, dtype):
    """Numbers that bfloat16 does not have, in a checkpoint whose other weights are in it."""
    path = shutil.copytree(make_checkpoint("qwen3_5_moe", dtype="bfloat16"), tmp_path / "mixed")
    tensors, stored = load_file(path / "model.safetensors"), f"model.layers.0.{name}"
    save_file(tensors | {stored: tensors[stored].float() * (1 + 2**-20)}, path / "model.safetensors")
    assert cpu_checkpoint_dtype(path, ModelConfig.from_dir(path)) == dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", torch.float16), ("float", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_names_are_those_of_the_field(config, name, dtype):
    assert resolve_dtype(name, config.checkpoint_dtype) is dtype


def test_an_unknown_dtype_is_rejected(config):
    with pytest.raises(ConfigError, match="dtype is 'int8', supported are auto, float32"):
        resolve_dtype("int8", config.checkpoint_dtype)


def test_16_bit_dtypes_are_rejected_by_operations_of_fp32(config):
    with pytest.raises(ConfigError, match=r"'bfloat16', supported on a CPU by plain PyTorch .* are float32 and auto"):
        resolve_dtype("bfloat16", config.checkpoint_dtype, is_fp32_only=True)


def test_an_8b_model_starts_on_a_cpu_with_16_gb_and_in_int8_with_10_gib():
    """While an int8 model loads, it takes its packed weights and one matrix of the checkpoint."""
    config = ModelConfig.from_dir(find_shape("llama-3.1-8b"))
    assert 16.0e9 < weights_bytes(config, torch.bfloat16) < 16.1e9
    assert weights_bytes(config, torch.float32) > 32e9
    largest_matrix = config.vocab_size * config.hidden_size * 2
    work_bytes = 14 * 2**20
    assert weights_bytes(config, torch.bfloat16, quantization="int8") + largest_matrix + work_bytes < 10 * 2**30


def peak_bytes_while_loading(config, ops, dtype, device):
    model = Decoder(config, ops, max_positions=1, dtype=dtype, device=device)
    with PeakBytes() as memory:
        model.load(lambda parts: [part.tensor.zero_() for part in parts.values()])
    return memory.peak_bytes


def test_quantising_on_load_takes_memory_for_the_8_bit_weights_and_one_matrix():
    """A 70B model fits one GPU of 141 GB, whose memory its 16-bit weights exceed."""
    whole = ModelConfig.from_dir(find_shape("llama-3.1-70b"))
    assert weights_bytes(whole, torch.bfloat16) > 141e9
    assert weights_bytes(whole, torch.bfloat16, quantization="fp8") < 75e9
    config, meta = replace(whole, num_layers=3), torch.device("meta")
    ops = GpuOps(meta, TARGETS["sm_90"], num_processors=132, quantize_weights=True, quantize_inputs=True)
    peak = peak_bytes_while_loading(config, ops, torch.bfloat16, meta)
    largest_matrix = 2 * config.intermediate_size * config.hidden_size * 2
    work_bytes = 14 * 2**24  # of the part being quantised: fp32 copies and the 8-bit result
    assert peak < weights_bytes(config, torch.bfloat16, quantization="fp8") + largest_matrix + work_bytes
    assert peak < 0.9 * weights_bytes(config, torch.bfloat16)


@pytest.mark.slow
def test_unpacking_superblocks_takes_memory_for_one_matrix():
    """The model is never dequantised, nor are all its integers unpacked."""
    shape = ModelConfig.from_dir(find_shape("llama-3.1-70b"))
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 40, "num_heads": 8, "vocab_size": 64}
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    kinds = {f"model.layers.{layer}.{name}": "Q4_K" for layer in range(40) for name in projections}
    config = replace(shape, **sizes, quantized=GgufWeights.of(kinds))
    peak = peak_bytes_while_loading(config, cpu_ops(), torch.float32, torch.device("cpu"))
    assert peak < 1.15 * weights_bytes(config, torch.float32, kept=(GgufWeights,), is_compact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [False, True])
def test_packing_on_a_cpu_takes_memory_for_the_packed_weights_and_one_matrix(quantize, dtype):
    shape = ModelConfig.from_dir(find_shape("llama-3.2-1b"))
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 4, "num_heads": 8, "vocab_size": 2048}
    config = replace(shape, **sizes)
    ops = cpu_ops(quantization="int8" if quantize else None)
    peak = peak_bytes_while_loading(config, ops, dtype, torch.device("cpu"))
    largest_matrix = 2 * config.intermediate_size * config.hidden_size * dtype.itemsize
    work_bytes = 14 * 2**20
    packed_bytes = weights_bytes(config, dtype, quantization="int8" if quantize else None)
    assert peak < packed_bytes + largest_matrix + work_bytes
    assert peak < weights_bytes(config, torch.float32) * (0.6 if quantize else 1.2 * dtype.itemsize / 4)
