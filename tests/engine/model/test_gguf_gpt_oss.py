"""gpt-oss in GGUF is the model of the folder that it was converted from; experts in MXFP4 keep their codes."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.gguf_writer import metadata_of, save_gguf, tensors_of, write_gguf
from engine.errors import CheckpointError, ConfigError
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.gguf_weights import GgufWeights
from engine.model.implementation import choose_implementation
from engine.model.loader import check_checkpoint, load_model, weights_bytes
from engine.model.mxfp4 import Mxfp4Weights
from engine.parallel.group import SingleRank
from kernels.cpu.packed_linear import Kind
from kernels.families import cpu_ops, reference_ops
from kernels.interface import KernelOps
from tests.support.engine.mxfp4_checkpoints import quantise_experts
from tests.support.engine.weights import loaded_parts

SIZES = {"dtype": "bfloat16", "intermediate_size": 128, "swiglu_limit": 7.0}  # llama.cpp knows no other limit

Pair = tuple[Path, Path]


@pytest.fixture
def in_mxfp4(make_checkpoint: Any, tmp_path: Path) -> Pair:
    """A folder with experts in MXFP4, and a GGUF file of the same numbers."""
    original, folder, file = make_checkpoint("gpt_oss", **SIZES), tmp_path / "mxfp4", tmp_path / "model.gguf"
    for path in (folder, tmp_path / "twin"):
        shutil.copytree(original, path)
    quantise_experts(original, folder, tmp_path / "twin")
    save_gguf(folder, file)
    return folder, file


def results(path: Path, ops: KernelOps, **options: Any) -> torch.Tensor:
    """What the mixture of the last layer computes."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    return load_model(path, ModelConfig.from_dir(path), ops, **options).layers[-1].feed_forward(x, None)


def check_equal_models(file: Path, folder: Path) -> None:
    found, expected = ModelConfig.from_dir(file), ModelConfig.from_dir(folder)
    assert all(mixture is not None and not mixture.is_stacked for mixture in found.traits.mixtures)
    mixtures = tuple(replace(mixture, is_stacked=True) for mixture in found.traits.mixtures if mixture is not None)
    traits = replace(found.traits, mixtures=mixtures)
    assert replace(found, traits=traits, quantized=None) == replace(
        expected, quantized=None, checkpoint_dtype=found.checkpoint_dtype
    )
    weights = {name: part.tensor for name, part in loaded_parts(file).items() if ".experts." not in name}
    their_weights = {name: part.tensor for name, part in loaded_parts(folder).items() if ".experts." not in name}
    assert weights.keys() == their_weights.keys()
    for name, tensor in their_weights.items():
        assert torch.equal(weights[name], tensor), name
    assert any(name.endswith("sinks") for name in weights)


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_experts_in_mxfp4_give_the_bits_of_the_folder(in_mxfp4: Pair, make_ops: Callable[[], KernelOps]) -> None:
    folder, file = in_mxfp4
    check_equal_models(file, folder)
    assert choose_implementation(file, "auto") == "chairlift"
    assert torch.equal(results(file, make_ops()), results(folder, make_ops()))


@pytest.mark.parametrize("make_ops", [reference_ops, cpu_ops])
def test_experts_in_32_bits_give_the_bits_of_the_folder(
    make_checkpoint: Any, tmp_path: Path, make_ops: Callable[[], KernelOps]
) -> None:
    folder, file = make_checkpoint("gpt_oss", swiglu_limit=7.0), tmp_path / "model.gguf"
    save_gguf(folder, file)
    check_equal_models(file, folder)
    assert torch.equal(results(file, make_ops()), results(folder, make_ops()))


def test_a_cpu_keeps_the_codes_and_a_byte_per_32_of_them(in_mxfp4: Pair) -> None:
    folder, file = in_mxfp4
    config, theirs = ModelConfig.from_dir(file), ModelConfig.from_dir(folder)
    assert isinstance(config.quantized, GgufWeights)
    assert config.quantized.has_microscaled_experts
    for quantization in (None, "int8"):
        found = weights_bytes(
            config,
            torch.bfloat16,
            quantization=quantization,
            kept=(GgufWeights,),
            is_compact=True,
        )
        expected = weights_bytes(theirs, torch.bfloat16, quantization=quantization, kept=(Mxfp4Weights,))
        assert found == expected
    experts: Any = load_model(file, config, cpu_ops()).layers[0].feed_forward
    linears = (*experts._experts.gate_up.layers, *experts._experts.down.layers)
    assert {linear.kind for linear in linears} == {Kind.MICROSCALED}


def test_ranks_add_up_to_the_whole(in_mxfp4: Pair) -> None:
    _, file = in_mxfp4
    parts = [results(file, reference_ops(), group=SingleRank(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(sum(parts), results(file, reference_ops()), rtol=1e-5, atol=1e-5)


def test_ranks_need_whole_blocks(in_mxfp4: Pair) -> None:
    _, file = in_mxfp4
    group = SingleRank(0, 8)
    with pytest.raises(ConfigError):
        check_checkpoint(file, ModelConfig.from_dir(file), torch.float32, group=group)


def test_a_scale_that_is_no_number_is_refused_by_name(in_mxfp4: Pair) -> None:
    _, file = in_mxfp4
    entry = open_checkpoint(file).tensors(file)["blk.1.ffn_up_exps.3.weight"]
    data = bytearray(file.read_bytes())
    data[entry.start] = 255
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight holds NaN"):
        results(file, cpu_ops())


def test_metadata_say_which_layers_have_windows_and_how_heads_rotate(in_mxfp4: Pair) -> None:
    folder, file = in_mxfp4
    tensors = tensors_of(folder)
    write_gguf(file, metadata_of(folder) | {"gpt-oss.attention.sliding_window_pattern": [False, True]}, tensors)
    assert ModelConfig.from_dir(file).traits.sliding_windows == (None, 24)
    write_gguf(file, metadata_of(folder) | {"gpt-oss.rope.scaling.type": "none"}, tensors)
    assert {rope and rope.rope_type for rope in ModelConfig.from_dir(file).traits.ropes} == {"default"}
    write_gguf(file, metadata_of(folder) | {"gpt-oss.expert_used_count": 7}, tensors)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 7, num_local_experts is 6"):
        ModelConfig.from_dir(file)


def test_a_missing_bias_is_reported_by_its_expert(in_mxfp4: Pair) -> None:
    folder, file = in_mxfp4
    tensors = tensors_of(folder)
    del tensors["blk.1.ffn_down_exps.bias"]
    write_gguf(file, metadata_of(folder), tensors)
    with pytest.raises(CheckpointError, match=r"the first is model\.layers\.1\.mlp\.experts\.0\.down_proj\.bias"):
        loaded_parts(file)
