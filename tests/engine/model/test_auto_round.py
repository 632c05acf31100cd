"""Checkpoints of AutoRound: layouts of GPTQ and AWQ, with settings of blocks and single layers."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.loader import load_model
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.int_checkpoints import FILE, Scheme, quantise_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
PACKINGS = {
    "auto_round:auto_gptq": Scheme("gptq", symmetric=True),
    "auto_round:gptq": Scheme("gptq", num_bits=8, group_size=-1),
    "auto_round:gptqmodel": Scheme("gptq_v2"),
    "auto_round:auto_awq": Scheme("awq"),
    "auto_round:awq": Scheme("awq", group_size=16),
}


def settings(packing="auto_round:auto_gptq", **fields):
    """Returns a `quantization_config` as AutoRound writes it."""
    scheme = PACKINGS.get(packing, Scheme("gptq"))
    return {
        "autoround_version": "0.9.2",
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": scheme.num_bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "iters": 200,
        **fields,
    }


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """make_twins(packing, **settings) -> (checkpoint in integers, the same values in fp32)."""

    def make(packing, *, keeps_g_idx=False, **fields):
        original = make_checkpoint("llama", dtype="float16", **SIZES)
        integers, twin = (shutil.copytree(original, tmp_path / name) for name in ("integers", "twin"))
        quantise_checkpoint(original, integers, twin, PACKINGS[packing])
        change(integers, lambda stored: {name: t for name, t in stored.items() if keeps_g_idx or "g_idx" not in name})
        set_config(integers, settings(packing, **fields))
        return integers, twin

    return make


def change(path, edit):
    save_file(edit(load_file(path / FILE)), path / FILE)


def set_config(path, section):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def outputs(path, ops):
    """Returns what the linear layers compute of fixed inputs."""
    model, generator = load_model(path, ModelConfig.from_dir(path), ops), torch.Generator().manual_seed(0)
    return [
        linear(ops, torch.randn(5, linear._in_features.total, generator=generator))
        for layer in model.layers
        for linear in layer.linears
    ]


def assert_same(path, twin, ops):
    assert all(torch.equal(a, b) for a, b in zip(outputs(path, ops), outputs(twin, ops), strict=True))


@pytest.mark.parametrize("packing", PACKINGS)
def test_integers_give_the_results_of_their_values(make_twins, packing):
    assert_same(*make_twins(packing), reference_ops())


def test_a_cpu_multiplies_integers_as_they_are(make_twins):
    assert_same(*make_twins("auto_round:auto_gptq"), cpu_ops())


@pytest.mark.parametrize("packing", ["auto_round:gptqmodel", "auto_round:gptq"])
def test_groups_of_inputs_in_their_order_may_be_stored(make_twins, packing):
    assert_same(*make_twins(packing, keeps_g_idx=True), reference_ops())


@pytest.mark.parametrize(
    "edit",
    [lambda groups: groups.flip(0), lambda groups: groups.to(torch.int64), lambda groups: groups[:63].clone()],
)
def test_groups_in_another_order_are_refused(make_twins, edit):
    integers, _ = make_twins("auto_round:gptqmodel", keeps_g_idx=True)
    name = "model.layers.1.self_attn.o_proj.g_idx"
    change(integers, lambda stored: stored | {name: edit(stored[name])})
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {name} is not part of this architecture")):
        load_model(integers, ModelConfig.from_dir(integers), reference_ops())


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_config": {f"model.layers.{n}.mlp.down_proj": {"bits": 16, "data_type": "float"} for n in range(2)}},
        {"extra_config": {".*mlp\\.down_proj.*": {"bits": 16}, "model.layers.0.mlp.up_proj": {"bits": 4}}},
        {"extra_config": {"down_proj$": {"bits": 16}, "model.layers.0.mlp.up_proj": {"sym": False, "group_size": 32}}},
        {"modules_to_not_convert": ["down_proj"]},
    ],
    ids=str,
)
def test_layers_in_16_bits_stay_as_they_are(make_twins, fields):
    integers, twin = make_twins("auto_round:auto_gptq", **fields)
    plain = {name: t.half() for name, t in load_file(twin / FILE).items() if "down_proj" in name}
    change(integers, lambda stored: {name: t for name, t in stored.items() if "down_proj" not in name} | plain)
    change(twin, lambda stored: stored | plain)
    assert_same(integers, twin, reference_ops())


@pytest.mark.parametrize(
    "blocks", ["model.layers.0", " model.layers.0 , other.layers", ["model.layers.0"], [["model.layers.0"]]]
)
@pytest.mark.parametrize("field", ["block_name_to_quantize", "to_quant_block_names"])
def test_only_the_blocks_that_are_named_are_quantised(make_twins, blocks, field):
    integers, twin = make_twins("auto_round:auto_awq", **{"block_name_to_quantize": None, field: blocks})
    plain = {name: t.half() for name, t in load_file(twin / FILE).items() if "layers.1." in name}
    change(integers, lambda stored: {name: t for name, t in stored.items() if "layers.1." not in name} | plain)
    change(twin, lambda stored: stored | plain)
    assert_same(integers, twin, reference_ops())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (settings(bits=2), "bits is 2, supported is 4 or 8"),
        (settings("auto_round:auto_awq", bits=8), "bits is 8, supported is 4"),
        (settings("auto_round:llm_compressor"), "packing_format is 'auto_round:llm_compressor', supported are auto_r"),
        (settings(data_type="mx_fp"), "data_type is 'mx_fp', supported is 'int'"),
        (settings(act_bits=8), "act_bits is 8, supported is 16: inputs are not quantised"),
        (
            settings(rotation_config={"block_size": 32}),
            "rotation_config is {'block_size': 32}: layers that are rotated",
        ),
        (settings(group_size=20), "group_size is 20, expected -1 or a multiple of 16"),
        (settings(quant_lm_head=True), "quant_lm_head is true: a quantised output head is not supported"),
        (
            settings(extra_config={"lm_head": {"bits": 4}}),
            "extra_config: lm_head has 4 bits: a quantised output head is not supported",
        ),
        (
            settings(extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}}),
            "extra_config: model.layers.0.mlp.up_proj has bits 8, supported are 4, as of all layers, and 16 bits",
        ),
        (
            settings(extra_config={"model.layers.0.mlp.up_proj": {"group_size": 128}}),
            "extra_config: model.layers.0.mlp.up_proj has group_size 128, supported are 32, as of all layers, and 16",
        ),
        (settings(extra_config=["up_proj"]), "extra_config is ['up_proj'], expected an object"),
        (settings(extra_config={"up_proj": 16}), "extra_config: up_proj is 16, expected an object"),
        (settings(extra_config={"(a+)+b": {"bits": 16}}), "has the pattern '.*(a+)+b', supported are 4 repeats"),
        (settings(block_name_to_quantize=7), "block_name_to_quantize is 7, expected a list of module names"),
    ],
)
def test_unsupported_settings_are_refused_by_name(make_checkpoint, tmp_path, section, message):
    path = shutil.copytree(make_checkpoint("llama"), tmp_path / "model")
    set_config(path, section)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_dir(path)


def test_the_former_name_of_the_method_is_read(make_twins):
    integers, twin = make_twins("auto_round:auto_gptq", quant_method="intel/auto-round")
    assert_same(integers, twin, reference_ops())
