"""Experts that are stored together are read as those that are stored one by one, each rank its own part."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.loader import check_checkpoint
from engine.parallel.group import SingleRank
from tests.support.engine.weights import loaded_parts

FILE = "model.safetensors"
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def check(path):
    check_checkpoint(path, ModelConfig.from_dir(path), torch.float32)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe", "qwen3_5_moe", "qwen3.5 with experts and images"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_numbers_are_those_of_experts_that_are_stored_one_by_one(make_checkpoint, architecture, num_ranks):
    apart, together = (make_checkpoint(architecture, joins_experts=joins) for joins in (False, True))
    names = load_file(together / FILE).keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert not any(re.search(r"experts\.\d", name) for name in names)
    for rank in range(num_ranks):
        expected, found = (loaded_parts(path, group=SingleRank(rank, num_ranks)) for path in (apart, together))
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert torch.equal(found[name].tensor, part.tensor), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_transposed_matrices_as_qwen3_vl_is_published_give_the_same_numbers(make_checkpoint, tmp_path, num_ranks):
    original = make_checkpoint("qwen3_5_moe", joins_experts=True)
    names = [name for name in load_file(original / FILE) if name.endswith((".gate_up_proj", ".experts.down_proj"))]
    path = changed(original, tmp_path, dict.fromkeys(names, lambda stack: stack.transpose(1, 2)))
    check(path)
    for rank in range(num_ranks):
        expected, found = (loaded_parts(path, group=SingleRank(rank, num_ranks)) for path in (original, path))
        for name, part in expected.items():
            assert torch.equal(found[name].tensor, part.tensor), name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (GATE_UP, lambda stack: stack[:5], "has shape [5, 80, 64], config.json requires [6, 80, 64]"),
        (GATE_UP, lambda stack: stack[:, 1:], "has shape [6, 79, 64], config.json requires [6, 80, 64]"),
        (GATE_UP, lambda stack: stack.transpose(0, 1), "has shape [80, 6, 64], config.json requires [6, 80, 64]"),
        (DOWN, lambda stack: stack[..., 0], "has shape [6, 64], config.json requires [6, 64, 40]"),
        (DOWN, lambda stack: stack.int(), "experts.0.down_proj.weight is I32, supported for this tensor are F32"),
        (DOWN, lambda stack: stack * torch.nan, "experts.0.down_proj.weight holds NaN or infinity"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(make_checkpoint, tmp_path, name, change, message):
    path = changed(make_checkpoint("qwen3_5_moe", joins_experts=True), tmp_path, {name: change})
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        check(path)
    assert "\n" not in str(error.value)


def changed(original: Path, folder: Path, changes: dict) -> Path:
    """Writes a copy of a checkpoint, some of whose tensors are changed."""
    tensors = load_file(original / FILE)
    tensors |= {name: change(tensors[name]).contiguous() for name, change in changes.items()}
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text((original / "config.json").read_text())
    return folder


def test_a_missing_half_is_named(make_checkpoint, tmp_path):
    original = make_checkpoint("qwen3_5_moe", joins_experts=True)
    path = changed(original, tmp_path, {})
    save_file({name: tensor for name, tensor in load_file(original / FILE).items() if name != DOWN}, path / FILE)
    message = "6 of 102 tensors are missing, the first is model.layers.1.mlp.experts.0.down_proj.weight"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check(path)


def test_experts_in_both_forms_are_refused(make_checkpoint, tmp_path):
    original = make_checkpoint("qwen3_5_moe", joins_experts=True)
    path = changed(original, tmp_path, {})
    down = load_file(original / FILE)[DOWN]
    one = {"model.layers.1.mlp.experts.3.down_proj.weight": down[3].clone()}
    save_file(load_file(original / FILE) | one, path / "other.safetensors")
    index = {"weight_map": dict.fromkeys(["a"], "other.safetensors")}
    (path / FILE).unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight is in .*experts\.down_proj too"):
        check(path)
