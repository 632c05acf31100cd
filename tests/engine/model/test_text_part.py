"""The text part of checkpoints for text and images; test_decoder.py and test_parity.py compare what it computes."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.implementation import choose_implementation
from engine.model.loader import check_checkpoint
from engine.model.model_folder import check_folder
from engine.model.text_part import decoder_names
from tests.support.engine.weights import loaded_parts

MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral"),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
}
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
        config = {"architectures": [MODELS[model_type][0]], "model_type": model_type, "text_config": text, **fields}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    "text",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 64},
        {"num_key_value_heads": 2},
        {"use_sliding_window": True, "max_window_layers": 3},
    ],
)
def test_absent_fields_have_the_defaults_of_transformers(folder, model_type, text):
    shape = {**SHAPE, "num_attention_heads": 32, "head_dim": 8} if model_type == "qwen3_vl" else SHAPE
    if model_type == "qwen3_vl":  # never has windows
        text = {name: value for name, value in text.items() if "window" not in name}
    path = folder(model_type, {"model_type": MODELS[model_type][1], "vocab_size": 300, **shape, **text})
    ours, theirs = ModelConfig.from_dir(path), transformers.AutoConfig.from_pretrained(path).text_config
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 7
    size = getattr(theirs, "sliding_window", None)
    windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
    assert ours.traits.sliding_windows == windows
    ids = getattr(theirs, "eos_token_id", None)
    assert ours.end_token_ids == (set() if ids is None else {ids})
    if model_type.startswith("qwen"):
        assert {rope.theta for rope in ours.traits.ropes} == {theirs.rope_parameters["rope_theta"]}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 5e4},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}},
        {"rope_scaling": {"type": "yarn", "mrope_section": [1, 1, 2], "factor": 4.0}, "rope_theta": 5e4},
    ],
)
def test_older_files_have_no_section_of_the_text(tmp_path, model_type, rope):
    text = {"vocab_size": 300, **SHAPE, "rms_norm_eps": 2e-6, "tie_word_embeddings": True, "eos_token_id": 5, **rope}
    own = {"architectures": [MODELS[model_type][0]], "model_type": model_type, "vision_config": {"hidden_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps({**own, **text, "torch_dtype": "bfloat16"}))
    ours, whole = ModelConfig.from_dir(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = whole.text_config
    assert (ours.hidden_size, ours.num_layers, ours.num_kv_heads) == (64, 7, theirs.num_key_value_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == whole.tie_word_embeddings
    assert ours.end_token_ids == {theirs.eos_token_id}
    assert ours.checkpoint_dtype == "bfloat16"
    for found in ours.traits.ropes:
        assert (found.rope_type, found.theta, found.factor) == (
            theirs.rope_parameters["rope_type"],
            theirs.rope_parameters["rope_theta"],
            theirs.rope_parameters.get("factor", 1.0),
        )


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("beside", [None, False, True])
@pytest.mark.parametrize("inside", [None, False, True])
def test_embeddings_of_qwen_are_tied_if_either_place_says_so(folder, model_type, beside, inside):
    own, text = ({} if value is None else {"tie_word_embeddings": value} for value in (beside, inside))
    path = folder(model_type, {"model_type": MODELS[model_type][1], "vocab_size": 300, **SHAPE, **text}, **own)
    theirs = transformers.AutoConfig.from_pretrained(path)
    assert ModelConfig.from_dir(path).tie_word_embeddings == theirs.tie_word_embeddings == bool(beside or inside)


@pytest.mark.parametrize("beside", [None, False, True])
@pytest.mark.parametrize("inside", [None, False])
@pytest.mark.parametrize("has_head", [False, True])
def test_embeddings_of_mistral_are_tied_unless_the_file_denies_it_or_has_a_head(folder, beside, inside, has_head):
    """`transformers` ties by the class, but keeps a head that differs from the embedding."""
    own, text = ({} if value is None else {"tie_word_embeddings": value} for value in (beside, inside))
    path = folder("mistral3", {"model_type": "mistral", "vocab_size": 300, **SHAPE, **text}, **own)
    assert transformers.AutoConfig.from_pretrained(path).tie_word_embeddings == (beside is not False)
    names = ["language_model.model.embed_tokens.weight", *(["language_model.lm_head.weight"] if has_head else [])]
    save_file({name: torch.full((300, 64), float(i)) for i, name in enumerate(names)}, path / "model.safetensors")
    assert ModelConfig.from_dir(path).tie_word_embeddings == (beside is not False and not has_head)


def test_the_end_token_of_a_class_is_for_files_that_name_none(folder):
    text = {"model_type": "qwen2_vl_text", "vocab_size": 300, **SHAPE}
    assert ModelConfig.from_dir(folder("qwen2_vl", text)).end_token_ids == {151645}
    assert ModelConfig.from_dir(folder("qwen2_vl", text, eos_token_id=5)).end_token_ids == {5}
    path = folder("qwen2_vl", text)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ModelConfig.from_dir(path).end_token_ids == {7}


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
            {"model_type": "mistral5"},
            {},
            "text_config: model_type is 'mistral5', the supported text part is mistral",
        ),
        (
            {"vocab_size": 300},
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config: quant_method is 'hqq', supported are",
        ),
    ],
)
def test_another_text_part_is_refused(folder, text, fields, words):
    with pytest.raises(CheckpointError, match=words):
        check_folder(folder("mistral3", {**SHAPE, **text}, **fields), is_dummy=True)


def test_the_text_part_may_be_quantised_by_either_section(folder):
    """Lists of modules have the names of the files, or those of the decoder."""
    text = {"model_type": "mistral", "vocab_size": 300, **SHAPE}
    for skipped in ("language_model.model.layers.3", "model.language_model.layers.3", "re:.*layers.3.mlp"):
        section = {"quant_method": "fp8", "modules_to_not_convert": ["vision_tower", skipped]}
        for config in (
            ModelConfig.from_dir(folder("mistral3", text, quantization_config=section)),
            ModelConfig.from_dir(folder("mistral3", {**text, "quantization_config": section})),
        ):
            assert not config.quantized.holds("model.layers.3.mlp.up_proj")
            assert config.quantized.holds("model.layers.2.mlp.up_proj")


def test_a_missing_section_is_refused(tmp_path):
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "vocab_size": 300, **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="text_config is missing"):
        check_folder(tmp_path, is_dummy=True)


@pytest.mark.parametrize(
    ("name", "skipped"), [("qwen2 with images", "visual."), ("qwen3 with images", "model.visual.")]
)
def test_tensors_of_qwen_for_images_are_skipped(make_checkpoint, name, skipped):
    path = make_checkpoint(name)
    for tensor in load_file(path / "model.safetensors"):
        assert (decoder_names(path)(tensor) is None) == tensor.startswith(skipped)
    check_checkpoint(path, ModelConfig.from_dir(path), torch.float32)


def test_only_tensors_for_images_are_skipped(make_checkpoint, tmp_path):
    path = make_checkpoint("mistral with images")
    tensors = load_file(path / "model.safetensors")
    skipped = {name.split(".")[0] for name in tensors if decoder_names(path)(name) is None}
    assert skipped == {"vision_tower", "multi_modal_projector"}
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    more = {**tensors, "other_tower.weight": tensors["vision_tower.ln_pre.weight"].clone()}
    save_file(more, tmp_path / "model.safetensors")
    config = ModelConfig.from_dir(tmp_path)
    check_checkpoint(path, config, torch.float32)
    with pytest.raises(CheckpointError, match=r"tensor other_tower\.weight is not part of this architecture"):
        check_checkpoint(tmp_path, config, torch.float32)


def test_names_of_both_layouts_are_those_of_the_decoder(make_checkpoint):
    name = decoder_names(make_checkpoint("mistral with images"))
    for prefix in ("language_model.model.", "model.language_model."):
        assert name(f"{prefix}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert name("language_model.lm_head.weight") == name("lm_head.weight") == "lm_head.weight"
    assert name("model.vision_tower.ln_pre.weight") is None
    assert name("other_tower.weight") == "other_tower.weight"


def test_other_models_keep_their_names(make_checkpoint):
    assert decoder_names(make_checkpoint("llama"))("vision_tower.ln_pre.weight") == "vision_tower.ln_pre.weight"


@pytest.mark.parametrize(
    "architecture", ["Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"]
)
def test_the_part_of_a_model_that_speaks_has_the_tensors_of_its_decoder(make_checkpoint, tmp_path, architecture):
    original = make_checkpoint("qwen3_moe")
    text = json.loads((original / "config.json").read_text()) | {"model_type": "qwen3_omni_moe_text"}
    fields = {"text_config": text, "tie_word_embeddings": False}
    speaks = "Thinker" not in architecture
    whole = {"thinker_config": fields} if speaks else fields
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "dtype": "float32", **whole}))
    tensors = load_file(original / "model.safetensors")
    if speaks:
        tensors = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    others = ("thinker.visual.x", "thinker.audio_tower.x", "talker.x", "code2wav.x") if speaks else ("visual.x",)
    save_file(tensors | {name: torch.ones(3) for name in others}, tmp_path / "model.safetensors")
    assert ModelConfig.from_dir(tmp_path) == replace(
        ModelConfig.from_dir(original), traits=ModelConfig.from_dir(tmp_path).traits
    )
    found, expected = (loaded_parts(path) for path in (tmp_path, original))
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(found[name].tensor, part.tensor), name


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_the_text_part_of_internvl_as_its_publisher_saves_it(make_checkpoint, tmp_path, name):
    """Its code is not executed: the section is `llm_config`, and says what the decoder is."""
    original = make_checkpoint(name)
    text = json.loads((original / "config.json").read_text())
    whole = {"architectures": ["InternVLChatModel"], "auto_map": {"AutoModel": "x.Y"}, "llm_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "model_type": "internvl_chat"}))
    tensors = load_file(original / "model.safetensors")
    others = {name: torch.ones(3) for name in ("vision_model.embeddings.class_embedding", "mlp1.0.weight")}
    save_file({f"language_model.{name}": tensors[name] for name in tensors} | others, tmp_path / "model.safetensors")
    assert choose_implementation(tmp_path, "auto") == "chairlift"
    assert ModelConfig.from_dir(tmp_path) == ModelConfig.from_dir(original)
    found, expected = (loaded_parts(path) for path in (tmp_path, original))
    assert found.keys() == expected.keys()
    for part_name, part in expected.items():
        assert torch.equal(found[part_name].tensor, part.tensor), part_name


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_predictions_of_several_tokens_are_not_read_beside_text_alone(make_checkpoint, tmp_path, architecture):
    """Files of Qwen3.5 have them, also if they are saved without the part for images, and those of Qwen3-Next."""
    original, copy = make_checkpoint(architecture), tmp_path / "copy"
    shutil.copytree(original, copy)
    added = {
        "mtp.layers.0.mlp.up_proj.weight": torch.full((3, 3), torch.nan),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.full((3, 4, 3), torch.nan),
    }
    save_file(load_file(original / "model.safetensors") | added, copy / "model.safetensors")
    found, expected = (loaded_parts(path) for path in (copy, original))
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.equal(found[name].tensor, part.tensor), name
