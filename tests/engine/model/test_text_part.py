"""The text part of checkpoints for text and images; test_decoder.py and test_parity.py compare what it computes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.loader import check_checkpoint
from engine.model.model_folder import check_folder
from engine.model.text_part import decoder_names

MODELS = {"gemma3": "Gemma3ForConditionalGeneration", "mistral3": "Mistral3ForConditionalGeneration"}
SHAPE = {
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path):
    """folder(model_type, text fields, **fields) -> folder with a config.json."""

    def write(model_type, text, **fields):
        config = {"architectures": [MODELS[model_type]], "model_type": model_type, "text_config": text, **fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("text", [{}, {"sliding_window": None}, {"sliding_window": 64}, {"num_key_value_heads": 2}])
def test_absent_fields_have_the_defaults_of_transformers(folder, model_type, text):
    own = {"gemma3": "gemma3_text", "mistral3": "mistral"}[model_type]
    path = folder(model_type, {"model_type": own, "vocab_size": 300, **SHAPE, **text})
    ours, theirs = ModelConfig.from_dir(path), transformers.AutoConfig.from_pretrained(path).text_config
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (theirs.head_dim or 8)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 7
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert ours.traits.sliding_windows == windows


def test_fields_beside_the_text_part_come_first(folder):
    text = {"model_type": "mistral", "vocab_size": 300, **SHAPE, "tie_word_embeddings": True, "eos_token_id": 5}
    config = ModelConfig.from_dir(
        folder("mistral3", text, tie_word_embeddings=False, eos_token_id=[7, 8], dtype="bfloat16")
    )
    assert not config.tie_word_embeddings
    assert config.end_token_ids == {7, 8}
    assert config.checkpoint_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "fields", "words"),
    [
        (
            {"model_type": "ministral3"},
            {},
            "text_config: model_type is 'ministral3', the supported text part is mistral",
        ),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config is not supported"),
    ],
)
def test_another_text_part_is_refused(folder, text, fields, words):
    with pytest.raises(CheckpointError, match=words):
        check_folder(folder("mistral3", {**SHAPE, **text}, **fields), is_dummy=True)


def test_only_tensors_for_images_are_skipped(make_checkpoint, tmp_path):
    path = make_checkpoint("mistral", with_images=True)
    tensors = load_file(path / "model.safetensors")
    skipped = {name.split(".")[0] for name in tensors if decoder_names(path)(name) is None}
    assert skipped == {"vision_tower", "multi_modal_projector"}
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    sound = {**tensors, "audio_tower.weight": tensors["vision_tower.ln_pre.weight"].clone()}
    save_file(sound, tmp_path / "model.safetensors")
    config = ModelConfig.from_dir(tmp_path)
    check_checkpoint(path, config, torch.float32)
    with pytest.raises(CheckpointError, match=r"tensor audio_tower\.weight is not part of this architecture"):
        check_checkpoint(tmp_path, config, torch.float32)


def test_names_of_both_layouts_are_those_of_the_decoder(make_checkpoint):
    name = decoder_names(make_checkpoint("mistral", with_images=True))
    for prefix in ("language_model.model.", "model.language_model."):
        assert name(f"{prefix}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert name("language_model.lm_head.weight") == name("lm_head.weight") == "lm_head.weight"
    assert name("model.vision_tower.ln_pre.weight") is None
    assert name("audio_tower.weight") == "audio_tower.weight"


def test_other_models_keep_their_names(make_checkpoint):
    assert decoder_names(make_checkpoint("llama"))("vision_tower.ln_pre.weight") == "vision_tower.ln_pre.weight"
