"""GGUF files of models with layers that keep state, or with an expert that all tokens share."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.bench.gguf_qwen35 import as_transformers_has_them
from engine.bench.gguf_writer import Tensor, metadata_of, plain, save_gguf, tensors_of, write_gguf
from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.implementation import choose_implementation
from tests.support.engine.gguf import of_a_model_for_images
from tests.support.engine.weights import check_same_tensors, loaded_tensors


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_5", {}),
        ("qwen3_5_moe", {}),
        ("qwen3_next", {"mlp_only_layers": [], "norm_topk_prob": True}),
    ],
)
def test_layers_with_state_are_those_of_the_folder_with_heads_in_another_order(
    make_checkpoint: Any, tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """Those of Qwen3-Next are in order, but the inputs of a delta rule are not in one matrix."""
    folder, path = make_checkpoint(name, num_hidden_layers=4, layer_types=None, **fields), tmp_path / "model.gguf"
    save_gguf(folder, path)
    assert choose_implementation(path, "auto") == "chairlift"
    found, traits = ModelConfig.from_dir(path), ModelConfig.from_dir(folder).traits
    if name == "qwen3_next":
        traits = replace(traits, fused_qkvz=False)
    else:
        heads = tuple(heads and heads._replace(is_tiled=True) for heads in traits.delta_rules)
        traits = replace(traits, delta_rules=heads)
    assert found == replace(ModelConfig.from_dir(folder), traits=traits)
    stored, wanted = (
        as_transformers_has_them(loaded_tensors(path), json.loads((folder / "config.json").read_text())),
        loaded_tensors(folder),
    )
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():  # files have decays and 1 + norms, whose inverses are rounded
        torch.testing.assert_close(stored[name], tensor, rtol=1e-6, atol=2e-7, msg=name)


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_text_parts_of_models_for_images_are_those_of_the_models_alone(
    make_checkpoint: Any, tmp_path: Path, name: str, architecture: str
) -> None:
    fields = {"mlp_only_layers": [], "norm_topk_prob": True} if name == "qwen3_moe" else {}
    folder, path = make_checkpoint(name, **fields), tmp_path / "model.gguf"
    write_gguf(path, of_a_model_for_images(metadata_of(folder), architecture), tensors_of(folder))
    assert ModelConfig.from_dir(path) == ModelConfig.from_dir(folder)
    check_same_tensors(loaded_tensors(path), loaded_tensors(folder))


@pytest.mark.parametrize("num_predicting", [0, 1])
def test_layers_that_attend_may_be_listed_with_or_without_those_that_predict(
    make_checkpoint: Any, tmp_path: Path, num_predicting: int
) -> None:
    folder, path = make_checkpoint("qwen3_5"), tmp_path / "model.gguf"
    for flags in ([True, False, True], [True, False, True, False][: 3 + num_predicting]):
        metadata = {
            "qwen35.attention.recurrent_layers": flags,
            "qwen35.block_count": 3 + num_predicting,
            "qwen35.nextn_predict_layers": num_predicting,
        }
        write_gguf(path, metadata_of(folder) | metadata, tensors_of(folder))
        assert ModelConfig.from_dir(path).attention_layers == (1,)


def test_layers_that_predict_several_tokens_are_not_read(make_checkpoint: Any, tmp_path: Path) -> None:
    """llama.cpp has them behind the others, with names of their own among their tensors."""
    folder = make_checkpoint("qwen3_5", layer_types=None, num_hidden_layers=4)
    paths = [tmp_path / f"{number}.gguf" for number in range(2)]
    save_gguf(folder, paths[0])
    ones, metadata = plain(torch.ones(64), "F32"), {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    added = {f"blk.4.{name}.weight": ones for name in ("attn_norm", "nextn.enorm", "nextn.eh_proj")}
    write_gguf(paths[1], metadata_of(folder) | metadata, tensors_of(folder) | added)
    assert ModelConfig.from_dir(paths[1]) == ModelConfig.from_dir(paths[0])
    check_same_tensors(loaded_tensors(paths[1]), loaded_tensors(paths[0]))
    write_gguf(paths[1], metadata_of(folder), tensors_of(folder) | added)
    with pytest.raises(CheckpointError, match=r"tensor blk\.4\.attn_norm\.weight is not part of this architecture"):
        loaded_tensors(paths[1])


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("ssm_a", plain(torch.zeros(4), "F32"), "tensor blk.0.ssm_a holds a number that is not negative"),
        ("ssm_a", plain(torch.full((4,), -torch.inf), "F32"), "tensor blk.0.ssm_a holds NaN or infinity"),
        ("ssm_a", None, "1 of .* tensors are missing, the first is model.layers.0.linear_attn.A_log"),
        ("ssm_a.weight", plain(-torch.ones(4), "F32"), "tensor blk.0.ssm_a.weight is not part of this architecture"),
        ("ssm_conv1d.weight", plain(torch.ones(512), "F32"), r"shape \[512\], the metadata requires \[128, 1, 4\]"),
    ],
)
def test_tensors_of_layers_with_state_that_do_not_fit_are_refused(
    make_checkpoint: Any, tmp_path: Path, name: str, tensor: Tensor | None, words: str
) -> None:
    folder, path = make_checkpoint("qwen3_5"), tmp_path / "model.gguf"
    tensors = {**tensors_of(folder), f"blk.0.{name}": tensor}
    metadata = metadata_of(folder) | {"qwen35.attention.recurrent_layers": [True, False, True]}
    write_gguf(path, metadata, {key: value for key, value in tensors.items() if value is not None})
    with pytest.raises(CheckpointError, match=words):
        loaded_tensors(path)


@pytest.mark.parametrize(
    ("architecture", "name", "tensor", "words"),
    [
        (
            "qwen2_moe",
            "ffn_gate_inp_shexp.weight",
            plain(torch.ones(63), "F32"),
            r"shape \[1, 63\], the metadata requires \[1, 64\]",
        ),
        (
            "qwen3_5_moe",
            "ffn_up_shexp.weight",
            plain(torch.ones(47, 64), "F32"),
            r"shape \[47, 64\], the metadata requires \[48, 64\]",
        ),
        ("qwen3_next", "ssm_in.weight", plain(torch.ones(192, 64), "F32"), "ssm_in.weight is not part of this"),
        (
            "qwen3_next",
            "ssm_ba.weight",
            plain(torch.ones(4, 64), "F32"),
            r"shape \[4, 64\], the metadata requires \[8, 64\]",
        ),
        (
            "qwen3_5_moe",
            "ffn_gate_up_exps.weight",
            plain(torch.ones(6, 80, 64), "F32"),
            r"ffn_gate_up_exps\.weight is in blk\.0\.ffn_gate_exps\.weight too",
        ),
    ],
)
def test_tensors_of_a_shared_expert_or_in_older_forms_are_refused_by_name(
    make_checkpoint: Any, tmp_path: Path, architecture: str, name: str, tensor: Tensor, words: str
) -> None:
    fields = {"mlp_only_layers": []} if architecture != "qwen3_5_moe" else {}
    folder, path = make_checkpoint(architecture, **fields), tmp_path / "model.gguf"
    metadata = metadata_of(folder)
    if architecture != "qwen2_moe":
        metadata[f"{metadata['general.architecture']}.attention.recurrent_layers"] = [True, False, True]
    write_gguf(path, metadata, {**tensors_of(folder), f"blk.0.{name}": tensor})
    with pytest.raises(CheckpointError, match=words):
        loaded_tensors(path)


def test_the_gate_of_a_shared_expert_may_have_one_row(make_checkpoint: Any, tmp_path: Path) -> None:
    """llama.cpp's converter leaves the dimension out."""
    folder, path = make_checkpoint("qwen2_moe", mlp_only_layers=[]), tmp_path / "model.gguf"
    tensors = tensors_of(folder)
    name = "blk.0.ffn_gate_inp_shexp.weight"
    assert tensors[name].shape == (64,)
    write_gguf(path, metadata_of(folder), {**tensors, name: tensors[name]._replace(shape=(1, 64))})
    check_same_tensors(loaded_tensors(path), loaded_tensors(folder))
