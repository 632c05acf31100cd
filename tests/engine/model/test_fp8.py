"""Checkpoints in 8-bit floats: supported formats, and results equal to those of their dequantised copies."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.fp8 import Fp8Weights
from engine.model.loader import load_model, weights_bytes
from kernels.families import cpu_ops, reference_ops
from kernels.fp8_weights import FP8_DTYPE
from tests.support.engine.weights import BLOCK_CONFIG, BLOCK_SIZES, loaded_parts, quantized_in_blocks

FILE = "model.safetensors"
PROJECTION = "model.layers.1.self_attn.k_proj"
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed_tensors(*, weights=None, activations=None, group=None, **fields):
    group_0 = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        | (weights or {}),
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        | (activations or {}),
        **(group or {}),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group_0},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **fields,
    }


COMPRESSED_BLOCKS = compressed_tensors(
    weights={"strategy": "block", "block_structure": [128, 128]},
    activations={"strategy": "group", "group_size": 128},
)
"""What llm-compressor writes for its scheme FP8_BLOCK."""


def quantised(weight, kind):
    """Quantises like the tools that write checkpoints; returns values and scales."""
    if kind == "block":
        return quantized_in_blocks(weight)
    largest = weight.float().abs().amax() if kind == "tensor" else weight.float().abs().amax(1, keepdim=True)
    scale = largest / 448
    shape = {"tensor": (), "channel": (len(weight), 1)}[kind]
    return (weight.float() / scale).to(FP8_DTYPE), scale.reshape(shape)


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """make_twins(kind, quantization_config, architecture="llama", ...) -> (8-bit checkpoint, the same dequantised)."""

    def make(kind, quantization_config, *, architecture="llama", except_for=(), input_scales=False, **overrides):
        original = make_checkpoint(architecture, dtype="bfloat16", **overrides)
        small = shutil.copytree(original, tmp_path / "fp8")
        twin = shutil.copytree(original, tmp_path / "twin")
        stored, plain = {}, {}
        for name, tensor in load_file(original / FILE).items():
            module = name.removesuffix(".weight")
            plain[name] = stored[name] = tensor
            if module.endswith("_proj") and module not in except_for:
                values, scale = quantised(tensor, kind)
                if kind == "block":
                    is_compressed = quantization_config["quant_method"] == "compressed-tensors"
                    stored |= {name: values, f"{name}_scale{'' if is_compressed else '_inv'}": scale}
                    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                else:
                    stored |= {name: values, f"{name}_scale": scale}
                plain[name] = values.float() * scale
                if input_scales:
                    stored[f"{module}.input_scale"] = torch.tensor(0.5)
        save_file(stored, small / FILE)
        save_file({name: tensor.float() for name, tensor in plain.items()}, twin / FILE)
        config = json.loads((small / "config.json").read_text())
        (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
        (small / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
        return small, twin

    return make


def layer_outputs(path, ops):
    """Returns the outputs of the output head and of the linear layers of the last decoder layer, for fixed inputs."""
    model = load_model(path, ModelConfig.from_dir(path), ops)
    layer = model.layers[-1]
    generator = torch.Generator().manual_seed(0)
    hidden, heads = model.config.hidden_size, model.config.num_heads * model.config.head_dim
    outputs = [model.compute_logits(torch.randn(5, hidden, generator=generator))]
    inner = model.config.intermediate_size
    for linear, columns in (
        (layer.mixer.qkv, hidden),
        (layer.mixer.o, heads),
        (layer.feed_forward.gate_up, hidden),
        (layer.feed_forward.down, inner),
    ):
        outputs.append(linear(ops, torch.randn(5, columns, generator=generator)))
    return outputs


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("tensor", DYNAMIC),
        ("channel", compressed_tensors()),
        ("block", BLOCK_CONFIG),
        ("block", COMPRESSED_BLOCKS),
    ],
    ids=["tensor", "channel", "block", "compressed block"],
)
@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_an_8_bit_checkpoint_computes_the_same_as_its_dequantised_copy(make_twins, kind, config, make_ops):
    sizes = BLOCK_SIZES if kind == "block" else {}
    small, twin = make_twins(kind, config, architecture="qwen2", **sizes)
    outputs, expected = layer_outputs(small, make_ops()), layer_outputs(twin, make_ops())
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_loaded_8_bit_weights_equal_those_of_transformers(make_twins):
    import transformers

    small, twin = make_twins("channel", compressed_tensors())
    oracle = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    loaded = loaded_parts(small)
    for name, parameter in oracle.named_parameters():
        part = loaded[name]
        scale = loaded[f"{name}_scale"].tensor[:, None] if part.tensor.dtype is FP8_DTYPE else 1.0
        assert torch.equal(part.tensor.float() * scale, parameter)


def test_blocks_must_divide_every_matrix(make_twins):
    small, _ = make_twins("tensor", BLOCK_CONFIG)
    message = r"blocks of 128 x 128 weights do not divide model.layers.0.self_attn.q_proj of 64 rows and 64 columns"
    with pytest.raises(CheckpointError, match=message):
        load_model(small, ModelConfig.from_dir(small), reference_ops())


def test_static_scales_of_keys_and_values_are_not_used_and_logged(make_twins, caplog):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    small, twin = make_twins("channel", compressed_tensors(kv_cache_scheme=scheme))
    scales = {f"model.layers.{n}.self_attn.{name}_scale": torch.tensor(0.1) for n in range(2) for name in "kv"}
    rewrite(small, lambda tensors: tensors.update(scales))
    with caplog.at_level("INFO"):
        outputs = layer_outputs(small, cpu_ops())
    (line,) = [record.getMessage() for record in caplog.records if "key and value scales" in record.getMessage()]
    assert line == (
        "4 key and value scales of the checkpoint are not used: an 8-bit cache (--kv-cache-dtype) computes a scale per "
        "token and head instead"
    )
    assert all(torch.equal(a, b) for a, b in zip(outputs, layer_outputs(twin, cpu_ops()), strict=True))


def test_a_scale_per_tensor_is_repeated_for_each_row(make_twins):
    """Queries, keys and values are one matrix, their scales are three."""
    small, _ = make_twins("tensor", DYNAMIC)
    stored, parts = load_file(small / FILE), loaded_parts(small)
    scales = [parts[f"model.layers.0.self_attn.{name}_proj.weight_scale"].tensor for name in "qkv"]
    assert [len(scale) for scale in scales] == [64, 32, 32]
    for name, scale in zip("qkv", scales, strict=True):
        assert (scale == stored[f"model.layers.0.self_attn.{name}_proj.weight_scale"]).all()
    assert len({float(scale[0]) for scale in scales}) == 3


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("pattern", ["model.layers.1.mlp.down_proj", "layers.1.mlp.down_proj", "re:.*1.mlp.down_proj"])
def test_layers_that_are_not_quantised_keep_their_dtype(make_twins, field, pattern):
    except_for = ("model.layers.1.mlp.down_proj",)
    small, twin = make_twins("tensor", {**DYNAMIC, field: ["lm_head", pattern]}, except_for=except_for)
    parts = loaded_parts(small)
    assert parts["model.layers.1.mlp.down_proj.weight"].tensor.dtype is torch.float32
    assert parts["model.layers.0.mlp.down_proj.weight"].tensor.dtype is FP8_DTYPE
    outputs, expected = layer_outputs(small, cpu_ops()), layer_outputs(twin, cpu_ops())
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_only_layers_that_targets_name_are_in_8_bits(make_twins):
    except_for = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    names = ["re:.*self_attn.*", "re:.*mlp.(gate|up)_proj$"]
    small, twin = make_twins("channel", compressed_tensors(group={"targets": names}), except_for=except_for)
    assert loaded_parts(small)["model.layers.1.mlp.down_proj.weight"].tensor.dtype is torch.float32
    outputs, expected = layer_outputs(small, cpu_ops()), layer_outputs(twin, cpu_ops())
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_projections_of_one_matrix_must_all_be_in_8_bits(make_twins):
    small, _ = make_twins("tensor", {**DYNAMIC, "ignored_layers": [PROJECTION]}, except_for=(PROJECTION,))
    with pytest.raises(CheckpointError, match=f"they form one matrix; {PROJECTION} is not"):
        load_model(small, ModelConfig.from_dir(small), reference_ops())


def test_scales_of_static_schemes_are_ignored_and_logged(make_twins, caplog):
    static = {**DYNAMIC, "activation_scheme": "static"}
    small, twin = make_twins("tensor", static, input_scales=True)
    with caplog.at_level("INFO"):
        outputs = layer_outputs(small, cpu_ops())
    (line,) = [record.getMessage() for record in caplog.records if "input_scale" in record.getMessage()]
    assert line.startswith("14 scales of activations (input_scale) in the checkpoint are not used: where products")
    assert all(torch.equal(a, b) for a, b in zip(outputs, layer_outputs(twin, cpu_ops()), strict=True))


def rewrite(path, change):
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.update({f"{PROJECTION}.weight": tensors[f"{PROJECTION}.weight"].float()}),
            f"tensor {PROJECTION}.weight is F32, quantization_config requires F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(FP8_DTYPE)}),
            "tensor lm_head.weight is F8_E4M3, supported for this tensor are F32, F16, BF16",
        ),
        (
            lambda tensors: tensors.pop(f"{PROJECTION}.weight_scale"),
            f"1 of 35 tensors are missing, the first is {PROJECTION}.weight_scale",
        ),
        (
            lambda tensors: tensors.update({f"{PROJECTION}.weight_scale": torch.ones(4, 8)}),
            f"tensor {PROJECTION}.weight_scale has shape [4, 8], config.json requires [32]",
        ),
    ],
)
def test_a_tensor_that_contradicts_the_configuration_is_named(make_twins, change, message):
    small, _ = make_twins("tensor", DYNAMIC)
    rewrite(small, change)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_model(small, ModelConfig.from_dir(small), reference_ops())
    assert str(small / FILE) in str(caught.value) or "missing" in message


def test_8_bits_without_a_quantization_config_are_rejected(make_twins):
    small, twin = make_twins("tensor", DYNAMIC)
    shutil.copy(twin / "config.json", small / "config.json")
    with pytest.raises(CheckpointError, match=r"is F8_E4M3, supported for|is not part of this architecture"):
        load_model(small, ModelConfig.from_dir(small), reference_ops())


def test_weights_bytes_count_weights_in_the_dtype_in_memory(make_twins):
    small, twin = make_twins("tensor", DYNAMIC)
    config, plain = ModelConfig.from_dir(small), ModelConfig.from_dir(twin)
    num_scales = sum(part.tensor.numel() for part in loaded_parts(small).values() if part.is_scale)
    expected = weights_bytes(plain, torch.float32)
    assert weights_bytes(config, torch.float32) == expected
    num_values = sum(
        part.tensor.numel() for name, part in loaded_parts(small).items() if f"{name}_scale" in loaded_parts(small)
    )
    assert weights_bytes(config, torch.float32, kept=(Fp8Weights,)) == expected - 3 * num_values + 4 * num_scales


def test_weights_bytes_count_layers_that_are_not_in_8_bits_in_the_dtype(make_twins):
    """They are as large as in the checkpoint, which has scales per block and one layer in bfloat16."""
    config = BLOCK_CONFIG | {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.down_proj"]}
    small, _ = make_twins("block", config, except_for=("model.layers.1.mlp.down_proj",), **BLOCK_SIZES)
    stored = load_file(small / FILE)
    expected = sum(tensor.nbytes for tensor in stored.values())
    assert any(tensor.dtype is FP8_DTYPE for tensor in stored.values())
    assert weights_bytes(ModelConfig.from_dir(small), torch.bfloat16, kept=(Fp8Weights,)) == expected


@pytest.mark.parametrize(("kind", "config", "sizes"), [("tensor", DYNAMIC, {}), ("block", BLOCK_CONFIG, BLOCK_SIZES)])
def test_dummy_weights_in_8_bits_keep_activations_near_unit_scale(make_twins, kind, config, sizes):
    small, _ = make_twins(kind, config, **sizes)
    ops = cpu_ops()
    model = load_model(small, ModelConfig.from_dir(small), ops, load_format="dummy")
    x = torch.randn(200, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert 0.9 < float(model.layers[0].mixer.qkv(ops, x).std()) < 1.1
    assert 0.9 < float(model.layers[0].feed_forward.gate_up(ops, x).std()) < 1.1


@pytest.mark.parametrize(
    ("quantization_config", "message"),
    [
        (
            {"bits": 4},
            "quantization_config: quant_method is 'absent', supported are fp8, gptq, awq, auto-round, mxfp4, modelopt, "
            "compressed-tensors",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method is 'bitsandbytes', supported are fp8, gptq, awq, auto-round, mxfp4, modelopt, "
            "compressed-tensors; serve the",
        ),
        (
            {**DYNAMIC, "weight_block_size": [64, 128]},
            "quantization_config: weight_block_size is [64, 128], supported is [128, 128]",
        ),
        (
            {**BLOCK_CONFIG, "activation_scheme": "static"},
            "activation_scheme is 'static', supported with weight_block_size is dynamic",
        ),
        ({**DYNAMIC, "activation_scheme": "none"}, "activation_scheme is 'none', supported are dynamic, static"),
        ({**DYNAMIC, "ignored_layers": "lm_head"}, "ignored_layers is 'lm_head', expected a list of module names"),
        ({**DYNAMIC, "ignored_layers": ["re:("]}, "ignored_layers has the invalid pattern '('"),
        (compressed_tensors(config_groups={}), "config_groups has 0 groups, supported are 1 to 64"),
        (
            compressed_tensors(kv_cache_scheme={"num_bits": 8, "type": "int"}),
            "kv_cache_scheme: type is 'int' with num_bits 8, supported is 'float' with num_bits 8",
        ),
        (
            compressed_tensors(group={"targets": ["Embedding"]}),
            "targets is ['Embedding'], supported are 'Linear', names of",
        ),
        (
            compressed_tensors(weights={"num_bits": 6}),
            "weights: type is 'float' with num_bits 6, supported are 'float'",
        ),
        (compressed_tensors(weights={"num_bits": 4}), "format is 'float-quantized', supported with 4-bit floats are"),
        (
            compressed_tensors(weights={"strategy": "block"}),
            "weights: block_structure is None, supported is [128, 128]",
        ),
        (
            compressed_tensors(weights={"strategy": "group"}),
            "weights: strategy is 'group', supported are tensor, channel, block",
        ),
        (
            compressed_tensors(
                weights={"strategy": "block", "block_structure": [128, 128]},
                activations={"strategy": "group", "group_size": 64},
            ),
            "input_activations: group_size is 64, supported is 128",
        ),
        (
            compressed_tensors(
                weights={"strategy": "block", "block_structure": [128, 128]}, activations={"strategy": "channel"}
            ),
            "input_activations: strategy is 'channel', supported are group, token, tensor",
        ),
        (compressed_tensors(weights={"symmetric": False}), "weights: symmetric is false, supported is true"),
        (compressed_tensors(group={"input_activations": None}), "input_activations: type is 'absent'"),
        (
            compressed_tensors(activations={"strategy": "group"}),
            "input_activations: strategy is 'group', supported are token, tensor",
        ),
    ],
)
def test_unsupported_quantisations_are_rejected(make_checkpoint, tmp_path, quantization_config, message):
    config = json.loads((make_checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        ModelConfig.from_dir(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
