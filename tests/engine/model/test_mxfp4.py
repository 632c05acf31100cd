"""Checkpoints of gpt-oss with experts in MXFP4: values, ranks, memory, and what is refused."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import check_checkpoint, load_model, weights_bytes
from engine.model.mxfp4 import Mxfp4Weights
from engine.parallel.group import SingleRank
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.mxfp4_checkpoints import CONFIG, FILE, quantise_experts


@pytest.fixture
def make_twins(make_checkpoint, tmp_path):
    """Makes a checkpoint with experts in MXFP4, and one with their values in fp32."""

    def make(**overrides):
        original = make_checkpoint("gpt_oss", **{"dtype": "bfloat16", "intermediate_size": 128, **overrides})
        paths = tmp_path / "quantised", tmp_path / "twin"
        for path in paths:
            shutil.copytree(original, path)
        quantise_experts(original, *paths)
        return paths

    return make


def load(path, ops, **options):
    return load_model(path, ModelConfig.from_dir(path), ops, dtype=torch.float32, **options)


def results(path, ops, **options):
    """Returns what the mixture of the last layer computes."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    return load(path, ops, **options).layers[-1].feed_forward(x, None)


def set_quantization(path, section):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


def change_tensors(path, change):
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_experts_give_the_bits_of_the_values_that_transformers_computes(make_twins, make_ops):
    quantised, twin = make_twins()
    assert torch.equal(results(quantised, make_ops()), results(twin, make_ops()))


def test_a_cpu_keeps_the_codes_and_a_byte_per_32_of_them(make_twins):
    quantised, twin = make_twins()
    config, plain = ModelConfig.from_dir(quantised), ModelConfig.from_dir(twin)
    weights = 2 * 6 * 3 * 64 * 128  # layers, experts, matrices of each
    saved = weights_bytes(plain, torch.bfloat16) - weights_bytes(config, torch.bfloat16, kept=(Mxfp4Weights,))
    assert saved == 2 * weights - weights // 2 - weights // 32
    linears = load(quantised, cpu_ops()).layers[0].feed_forward._experts.gate_up.layers
    assert sum(layer.weight.nbytes + layer.codes.nbytes for layer in linears) == 6 * 2 * 128 * (64 // 2 + 64 // 32)


def test_ranks_add_up_to_the_whole(make_twins):
    quantised, _ = make_twins()
    whole = results(quantised, reference_ops())
    parts = [results(quantised, reference_ops(), group=SingleRank(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def test_ranks_without_whole_groups_are_refused(make_twins):
    quantised, _ = make_twins(intermediate_size=96, num_attention_heads=6, num_key_value_heads=2)
    config = ModelConfig.from_dir(quantised)
    message = "gives each rank 48 inputs of model.layers.0.mlp.experts.down_proj, not a multiple of the 32"
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_checkpoint(quantised, config, torch.float32, group=SingleRank(0, 2))


def test_random_weights_are_refused(make_twins):
    with pytest.raises(ConfigError, match="--load-format dummy is not supported with weights of 4 bits"):
        load(make_twins()[0], cpu_ops(), load_format="dummy")


def test_bad_tensors_are_refused_with_their_names(make_twins):
    quantised, _ = make_twins()
    name = "model.layers.1.mlp.experts.down_proj"

    def refused(change, message):
        original = (quantised / FILE).read_bytes()
        change_tensors(quantised, change)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load(quantised, cpu_ops())
        (quantised / FILE).write_bytes(original)

    refused(lambda tensors: tensors[f"{name}_scales"][2, 3].fill_(255), f"tensor {name}_scales holds NaN")
    refused(
        lambda tensors: tensors.update({f"{name}_blocks": torch.zeros(6, 64, 3, 16, dtype=torch.uint8)}),
        f"tensor {name}_blocks has shape [6, 64, 3, 16], config.json requires [6, 64, 4, 16]",
    )
    refused(
        lambda tensors: tensors.update({f"{name}_blocks": tensors[f"{name}_blocks"].view(torch.int8)}),
        f"tensor {name}_blocks is I8, quantization_config requires U8",
    )
    refused(lambda tensors: tensors.pop(f"{name}_scales"), f"the first is {name}_scales")


def test_sizes_and_formats_that_do_not_fit_are_refused(make_twins, make_checkpoint, tmp_path):
    quantised, _ = make_twins()
    config = json.loads((quantised / "config.json").read_text())

    def refused(path, fields, message):
        (path / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            check_checkpoint(path, ModelConfig.from_dir(path), torch.float32)

    sized = {"intermediate_size": 100}
    refused(quantised, sized, "down_proj has 100 inputs, not a multiple of the 32 that share a scale in mxfp4")
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    refused(quantised, {"quantization_config": gptq}, "gate_up_proj is one tensor for all experts, which is supported")

    mixtral = tmp_path / "mixtral"
    shutil.copytree(make_checkpoint("mixtral"), mixtral)
    set_quantization(mixtral, {**CONFIG, "modules_to_not_convert": []})
    message = "mxfp4 is not supported for model.layers.0.block_sparse_moe.experts.0"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_checkpoint(mixtral, ModelConfig.from_dir(mixtral), torch.float32)


def test_layers_of_experts_that_are_not_converted_are_in_16_bits(make_twins):
    quantised, twin = make_twins()
    values = {name: tensor for name, tensor in load_file(twin / FILE).items() if "layers.0.mlp.experts" in name}

    def replace(tensors):
        for name in [name for name in tensors if "layers.0.mlp.experts" in name]:
            del tensors[name]
        tensors.update(values)

    change_tensors(quantised, replace)
    set_quantization(quantised, {**CONFIG, "modules_to_not_convert": ["model.layers.0.mlp.experts"]})
    assert torch.equal(results(quantised, cpu_ops()), results(twin, cpu_ops()))
