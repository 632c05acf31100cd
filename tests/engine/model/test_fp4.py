"""Checkpoints in 4-bit floats: the layouts of ModelOpt and llm-compressor give their values, in 4.25 and 4.5 bits."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.fp4 import Fp4Weights
from engine.model.loader import check_checkpoint, cpu_checkpoint_dtype, load_model, weights_bytes
from engine.parallel.group import SingleRank
from kernels.cpu.packed_linear import Kind
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.float_checkpoints import CONFIGS, FILE, quantise_floats

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
LAYOUTS = ["modelopt", "nvfp4", "mxfp4"]
PROJECTION = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """make_twins(layout, architecture="llama") -> (checkpoint in 4-bit floats, the same values in fp32)."""

    def make(layout, architecture="llama", **overrides):
        original = make_checkpoint(architecture, dtype="bfloat16", **{**SIZES, **overrides})
        folders = [shutil.copytree(original, tmp_path / name) for name in ("floats", "twin")]
        quantise_floats(original, *folders, layout)
        return folders

    return make


def load(path, ops, **options):
    return load_model(path, ModelConfig.from_dir(path), ops, dtype=torch.float32, **options)


def outputs(path, ops):
    """Returns logits of hidden states, and the results of the linear layers of the last decoder layer."""
    model = load(path, ops)
    layer, generator = model.layers[-1], torch.Generator().manual_seed(0)
    results = [model.compute_logits(torch.randn(5, 64, generator=generator))]
    mlp = layer.feed_forward
    for linear, size in ((layer.mixer.qkv, 64), (layer.mixer.o, 64), (mlp.gate_up, 64), (mlp.down, 128)):
        results.append(linear(ops, torch.randn(5, size, generator=generator)))
    return results


def set_config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= fields
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_codes_give_the_bits_of_their_values(make_twins, layout, architecture, make_ops):
    """In Phi-3 a projection is several matrices with one scale."""
    floats, twin = make_twins(layout, architecture)
    expected, got = outputs(twin, make_ops()), outputs(floats, make_ops())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_rows_that_are_reordered_keep_their_scales(make_twins):
    """GLM rotates neighbouring dimensions, so that rows of queries and keys are exchanged in memory."""
    floats, twin = make_twins("modelopt", "glm", head_dim=16)
    expected, got = outputs(twin, cpu_ops()), outputs(floats, cpu_ops())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("layout", "architecture"), [*((layout, "qwen3_moe") for layout in LAYOUTS), ("modelopt", "qwen2_moe")]
)
def test_experts_give_the_bits_of_their_values(make_twins, layout, architecture):
    """Also one that all tokens share."""
    sizes = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2}
    if architecture == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 64
    floats, twin = make_twins(layout, architecture, **sizes)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    for ops in (reference_ops(), cpu_ops()):
        expected, got = (load(path, ops).layers[-1].feed_forward(x, None) for path in (twin, floats))
        assert torch.equal(got, expected), ops.name


@pytest.mark.parametrize(("layout", "bits"), [("modelopt", 4.5), ("nvfp4", 4.5), ("mxfp4", 4.25)])
def test_a_cpu_keeps_the_codes_and_a_byte_per_group(make_twins, layout, bits):
    floats, twin = make_twins(layout)
    config, plain = ModelConfig.from_dir(floats), ModelConfig.from_dir(twin)
    tensors = [tensor for name, tensor in load_file(twin / FILE).items() if "_proj." in name]
    num_weights, num_rows = sum(tensor.numel() for tensor in tensors), sum(len(tensor) for tensor in tensors)
    dense = weights_bytes(plain, torch.bfloat16) - 2 * num_weights

    def stored(**options):
        return weights_bytes(config, torch.bfloat16, kept=(Fp4Weights,), **options) - dense

    assert stored(is_compact=True) == num_weights * bits / 8 + 4 * num_rows
    assert stored() == num_weights + 8 * num_weights // (32 if layout == "mxfp4" else 16)  # as integers, on a GPU
    assert weights_bytes(config, torch.bfloat16) - dense == 2 * num_weights
    kinds = set()
    for layer in load(floats, cpu_ops()).layers:
        for linear in layer.linears:
            packed = linear._packed
            kinds.add(packed.kind)
            rows = packed.out_features + -packed.out_features % 32
            num_bytes = packed.weight.nbytes + packed.codes.nbytes + packed.scales.nbytes
            assert num_bytes == rows * (packed.in_features * bits / 8 + 4)
    assert kinds == {Kind.MICROSCALED if layout == "mxfp4" else Kind.NVFP4}
    assert cpu_checkpoint_dtype(floats, config) == "bfloat16"


def test_int8_on_load_takes_a_byte_per_weight(make_twins):
    floats, twin = make_twins("modelopt")
    config, plain = ModelConfig.from_dir(floats), ModelConfig.from_dir(twin)
    options = {"quantization": "int8", "is_compact": True}
    expected = weights_bytes(plain, torch.bfloat16, **options)
    assert weights_bytes(config, torch.bfloat16, kept=(Fp4Weights,), **options) == expected
    layers = load(floats, cpu_ops(quantization="int8")).layers
    assert {linear._packed.kind for layer in layers for linear in layer.linears} == {Kind.INT8}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_shards(make_twins, layout):
    floats, twin = make_twins(layout, num_attention_heads=4, num_key_value_heads=2)
    for index in range(2):
        loaded = [load(path, reference_ops(), group=SingleRank(index, 2)) for path in (floats, twin)]
        for layers in zip(*(model.layers for model in loaded), strict=True):
            for linears in zip(*(layer.linears for layer in layers), strict=True):
                assert torch.equal(*(linear._packed[0] for linear in linears))


def test_sizes_that_groups_do_not_divide_are_refused(make_twins):
    floats, _ = make_twins("modelopt", intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = json.loads((floats / "config.json").read_text())

    def refused(error, fields, message, **options):
        (floats / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(error, match=re.escape(message)):
            check_checkpoint(floats, ModelConfig.from_dir(floats), torch.float32, **options)

    message = "down_proj has 100 inputs, not a multiple of the 16 that share a scale in nvfp4"
    refused(CheckpointError, {"intermediate_size": 100}, message)
    message = "gives each rank 24 inputs of model.layers.0.mlp.down_proj, not a multiple of the 16 that share a scale"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    refused(ConfigError, sizes, message, group=SingleRank(0, 4))


@pytest.mark.parametrize(
    ("ignore", "layers"),
    [
        ({"ignore": ["lm_head", "model.layers.0*"]}, "layers.0."),
        ({"ignore": ["lm_head", "model.layers.*.self_attn*"]}, ".self_attn."),
        ({"ignore": None, "exclude_modules": ["*lm_head*", "*.mlp.down_proj"]}, ".down_proj."),
    ],
)
def test_modules_that_are_excluded_stay_as_they_are(make_twins, ignore, layers):
    floats, twin = make_twins("modelopt")
    stored, plain = load_file(floats / FILE), load_file(twin / FILE)
    changed = {name: tensor for name, tensor in plain.items() if layers in name}
    save_file({name: tensor for name, tensor in stored.items() if layers not in name} | changed, floats / FILE)
    set_config(floats, **ignore)
    expected, got = outputs(twin, cpu_ops()), outputs(floats, cpu_ops())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def change_tensor(path, name, change):
    tensors = load_file(path / FILE)
    tensors[name] = change(tensors[name])
    save_file(tensors, path / FILE)


def filled(code):
    """Returns what replaces the last scale of groups by one with these bits."""

    def change(scales):
        scales = scales.clone()
        scales.view(torch.uint8)[-1, -1] = code
        return scales

    return change


@pytest.mark.parametrize(
    ("layout", "tensor", "change", "message"),
    [
        ("modelopt", "weight", lambda codes: codes.view(torch.int8), "is I8, quantization_config requires U8"),
        ("modelopt", "weight", lambda codes: codes.float(), "is F32, quantization_config requires U8"),
        ("modelopt", "weight", lambda codes: codes[:, 1:].clone(), "has shape [32, 31], config.json requires [32, 32]"),
        ("modelopt", "weight_scale", lambda scales: scales.float(), "is F32, quantization_config requires F8_E4M3"),
        ("modelopt", "weight_scale", lambda scales: scales.t().contiguous(), "config.json requires [32, 4]"),
        ("modelopt", "weight_scale", filled(127), "holds NaN or infinity"),
        ("modelopt", "weight_scale", filled(255), "holds NaN or infinity"),
        ("modelopt", "weight_scale", filled(130), "weight_scale holds NaN or a number below 0"),
        ("modelopt", "weight_scale_2", lambda scale: scale * torch.nan, "weight_scale_2 holds NaN or infinity"),
        ("modelopt", "weight_scale_2", lambda _: torch.ones(3), "has shape [3], config.json requires [32]"),
        ("modelopt", "weight_scale_2", lambda _: torch.ones(1).to(torch.int32), "is I32, supported for this tensor"),
        ("nvfp4", "weight_global_scale", lambda scale: 0 * scale, "weight_global_scale is 0, no scale of weights"),
        ("mxfp4", "weight_scale", filled(255), "weight_scale holds NaN"),
        ("mxfp4", "weight_scale", lambda scales: scales.float(), "is F32, quantization_config requires U8"),
    ],
)
def test_wrong_tensors_are_reported_with_their_names(make_twins, layout, tensor, change, message):
    floats, _ = make_twins(layout, num_attention_heads=4, num_key_value_heads=2)
    change_tensor(floats, f"{PROJECTION}.{tensor}", change)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load(floats, cpu_ops())
    assert f"{PROJECTION}.{tensor}" in str(caught.value)


def test_nan_behind_the_sample_is_reported_too(make_twins):
    """The first 4 KiB of a tensor are checked before the load, all scales during it."""
    floats, _ = make_twins("modelopt", intermediate_size=2048)
    change_tensor(floats, "model.layers.1.mlp.down_proj.weight_scale", filled(255))
    check_checkpoint(floats, ModelConfig.from_dir(floats), torch.float32)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale holds NaN or a number below 0"):
        load(floats, cpu_ops())


def compressed(layout, weights=None, **fields):
    config = json.loads(json.dumps(CONFIGS[layout]))
    config["config_groups"]["group_0"] |= {key: value for key, value in fields.items() if key != "ignore"}
    config["config_groups"]["group_0"]["weights"] |= weights or {}
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIGS["modelopt"] | {"group_size": 32}, "group_size is 32, supported with 4-bit floats is 16"),
        (compressed("nvfp4", {"group_size": 32}), "weights: group_size is 32, supported with 4-bit floats is 16"),
        (compressed("mxfp4", {"group_size": 16}), "weights: group_size is 16, supported with 4-bit floats is 32"),
        (compressed("nvfp4", {"strategy": "group"}), "supported with nvfp4-pack-quantized is tensor_group"),
        (compressed("nvfp4", {"symmetric": False}), "symmetric is false, supported is true"),
        (compressed("nvfp4", format="float-quantized"), "format is 'float-quantized', supported with 4-bit floats are"),
        (compressed("nvfp4", format=["a"]), "format is ['a'], supported with 4-bit floats are nvfp4-pack-quantized"),
        (compressed("nvfp4", input_activations={"type": "int"}), "type is 'int', supported beside 4-bit floats is"),
    ],
)
def test_unsupported_settings_are_refused_by_name(make_checkpoint, tmp_path, config, message):
    fields = json.loads((make_checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_dir(tmp_path)


def test_random_weights_are_refused(make_twins):
    with pytest.raises(ConfigError, match="--load-format dummy is not supported with weights of 4 bits"):
        load(make_twins("nvfp4")[0], reference_ops(), load_format="dummy")


def test_experts_that_are_one_tensor_are_refused(make_checkpoint, tmp_path):
    fields = json.loads((make_checkpoint("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "quantization_config": CONFIGS["modelopt"]}))
    with pytest.raises(CheckpointError, match="is one tensor for all experts, which is supported in 16 bits"):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path), torch.float32)
