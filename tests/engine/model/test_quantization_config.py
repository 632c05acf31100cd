"""Groups of modules in the settings of llm-compressor: several with one format, or they are refused."""

import json
import re
import shutil

import pytest
import torch

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.loader import load_model
from kernels.families import reference_ops
from tests.support.engine.float_checkpoints import CONFIGS, quantise_floats
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint

ATTENTION, FEED_FORWARD = ["re:.*self_attn.*"], ["re:.*mlp.*_proj$"]


def in_groups(config, *targets, **changed):
    """Returns the settings of one group for several; changed: fields of the last one's weights."""
    config = json.loads(json.dumps(config))
    group = config["config_groups"]["group_0"]
    groups = {f"group_{n}": json.loads(json.dumps(group)) | {"targets": names} for n, names in enumerate(targets)}
    groups[f"group_{len(targets) - 1}"]["weights"] |= changed
    return config | {"config_groups": groups}


def set_config(path, section):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return path


@pytest.fixture
def path(make_checkpoint, tmp_path):
    """Returns a checkpoint whose settings a test may set."""
    return shutil.copytree(make_checkpoint("llama"), tmp_path / "model")


def linears(path):
    model = load_model(path, ModelConfig.from_dir(path), reference_ops(), dtype=torch.float32)
    return [linear._packed[0] for layer in model.layers for linear in layer.linears]


@pytest.mark.parametrize("numbers", [Scheme("packed"), "nvfp4", "modelopt fp8"])
def test_groups_of_one_format_are_read_together(make_checkpoint, tmp_path, numbers):
    original = make_checkpoint("llama", dtype="float16", hidden_size=64, intermediate_size=128)
    quantised, twin = (shutil.copytree(original, tmp_path / name) for name in ("quantised", "twin"))
    if isinstance(numbers, Scheme):
        config = numbers.config
        quantise_checkpoint(original, quantised, twin, numbers)
    else:
        config = CONFIGS[numbers] | {"quant_method": "compressed-tensors"}
        quantise_floats(original, quantised, twin, numbers)
    set_config(quantised, in_groups(config, ATTENTION, FEED_FORWARD))
    for weights, expected in zip(linears(quantised), linears(twin), strict=True):
        assert torch.equal(weights, expected.float())


@pytest.mark.parametrize(
    ("groups", "held", "not_held"),
    [
        ((ATTENTION, FEED_FORWARD), ("self_attn.q_proj", "mlp.up_proj"), ("other",)),
        ((ATTENTION, ["re:.*down_proj"]), ("self_attn.q_proj", "mlp.down_proj"), ("mlp.up_proj",)),
        ((ATTENTION, ["Linear"]), ("self_attn.q_proj", "mlp.up_proj", "other"), ()),
        ((ATTENTION,), ("self_attn.q_proj",), ("mlp.up_proj",)),
    ],
)
def test_modules_of_any_group_are_quantised(path, groups, held, not_held):
    set_config(path, in_groups(Scheme("packed").config, *groups))
    quantized = ModelConfig.from_dir(path).quantized
    assert all(quantized.holds(f"model.layers.0.{name}") for name in held)
    assert not any(quantized.holds(f"model.layers.0.{name}") for name in not_held)
    assert not quantized.holds("lm_head")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            in_groups(Scheme("packed").config, ATTENTION, FEED_FORWARD, num_bits=8),
            "config_groups has different formats, group_0 (num_bits 4, type 'int', strategy 'group', group_size 32, "
            "symmetric False) and group_1 (num_bits 8, type 'int', strategy 'group', group_size 32, symmetric False), "
            "supported is one",
        ),
        (
            in_groups(Scheme("packed").config, ATTENTION, FEED_FORWARD, type="float", num_bits=8, strategy="channel"),
            "group_1: weights: symmetric is false, supported is true",
        ),
        (
            in_groups(CONFIGS["nvfp4"], ATTENTION, FEED_FORWARD, type="int", strategy="group"),
            "format is 'nvfp4-pack-quantized', supported with integers are pack-quantized, int-quantized",
        ),
        (
            in_groups(Scheme("packed").config, *[[f"model.{n}" for n in range(2049)]] * 2),
            "config_groups has 4098 targets, at most 4096 are allowed",
        ),
        (in_groups(Scheme("packed").config, *[ATTENTION] * 65), "config_groups has 65 groups, supported are 1 to 64"),
    ],
)
def test_groups_of_different_formats_are_refused(path, config, message):
    set_config(path, config)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_dir(path)


def with_transforms(*apply):
    transforms = {"R4": {"type": "hadamard", "apply": apply[0] if apply else []}}
    return Scheme("packed").config | {"transform_config": {"config_groups": transforms}}


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        ([{"location": "weight_input", "targets": ["re:.*down_proj$"]}, {"location": "input"}], "R4 rotates 'input'"),
        ([{"location": "k_cache"}], "R4 rotates 'k_cache', supported are weight_input, weight_output; serve the"),
        (["output"], "R4 rotates 'output'"),
        ([{}], "R4 rotates None"),
        ("input", "R4 has apply 'input', expected a list"),
    ],
)
def test_rotations_that_steps_would_compute_are_refused(path, apply, message):
    set_config(path, with_transforms(apply))
    with pytest.raises(CheckpointError, match=re.escape(f"transform_config: config_groups: {message}")):
        ModelConfig.from_dir(path)


@pytest.mark.parametrize("apply", [[{"location": "weight_output"}, {"location": "weight_input"}], [], None])
def test_rotations_of_weights_are_part_of_them(path, apply):
    set_config(path, with_transforms(apply))
    assert ModelConfig.from_dir(path).quantized is not None


def test_different_kinds_of_numbers_are_refused_with_both(path):
    config = in_groups(CONFIGS["nvfp4"], ATTENTION, FEED_FORWARD, num_bits=8, strategy="tensor")
    config["config_groups"]["group_1"]["input_activations"] |= {"num_bits": 8, "strategy": "tensor"}
    set_config(path, config)
    message = (
        "has different formats, group_0 (num_bits 4, type 'float', strategy 'tensor_group', group_size 16, symmetric "
        "True, input num_bits 4, input type 'float'"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_dir(path)
