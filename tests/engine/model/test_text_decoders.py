"""The tables of text parts against the classes of `transformers`: the decoder that they name is what those compute."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from engine.model.architectures import FAMILIES as NATIVE_FAMILIES
from engine.model.config import ModelConfig
from engine.model.text_decoders import COMPUTED_AS, NATIVE_DECODERS, TEXT_PARTS, THINKERS, WITH_ANY_DECODER
from engine.model.text_part import decoder_names
from engine.model.transformers_config import text_config_of
from tests.support.engine.checkpoints import SIGLIP
from tests.support.engine.families import FAMILIES, family_config

WITHOUT_A_DEFAULT = ("AyaVision", "FastVlm", "Idefics3", "SmolVLM")
"""Classes whose default part for images needs another library, or values."""
SAVED_AS_IMAGES = ("Kimi_K25", "QianfanOCR")
"""Classes that transformers 5.24 saves with layers of the text part under names of those of images."""


def config_class(architecture):
    prefix = getattr(transformers, architecture).config_class.model_type
    return transformers.CONFIG_MAPPING[prefix]


def text_config(model_type):
    """A small configuration of a model type."""
    prefix = transformers.CONFIG_MAPPING[model_type].__name__.removesuffix("Config")
    fields = {**dict(FAMILIES.values()).get(prefix, {}), "tie_word_embeddings": False}
    if prefix == "Apertus1p5Text":
        fields["vocab_size"] = 266_441  # with the tokens of sound that its class requires
    return family_config(prefix, **fields)


@pytest.mark.parametrize("architecture", WITH_ANY_DECODER)
def test_a_class_for_any_decoder_computes_it_under_names_that_are_found(architecture, tmp_path):
    """The class on meta tensors, but for its decoder: text alone gets the hidden states of the decoder alone."""
    config, name = text_config(WITH_ANY_DECODER[architecture]), architecture.removesuffix("ForConditionalGeneration")
    needs_vision = name in WITHOUT_A_DEFAULT
    whole_config = config_class(architecture)(
        text_config=config.to_dict(), **({"vision_config": SIGLIP} if needs_vision else {})
    )
    text = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.device("cpu" if needs_vision else "meta"):
        whole = getattr(transformers, architecture)(whole_config).eval()
    assert type(whole.get_decoder()) is type(text.get_decoder())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": {}}))
    saved = whole.state_dict() if name in SAVED_AS_IMAGES else saved_tensors(whole)
    own_name = decoder_names(tmp_path)
    found = {own_name(stored): tensor.shape for stored, tensor in saved.items() if own_name(stored) is not None}
    expected = text.state_dict() if name in SAVED_AS_IMAGES else saved_tensors(text)
    assert found == {stored: tensor.shape for stored, tensor in expected.items()}
    place = next(name for name, module in whole.named_modules() if module is whole.get_decoder())
    whole.set_submodule(place, text.get_decoder())
    ids = torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = text.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(whole.model(input_ids=ids, use_cache=False).last_hidden_state, expected)


NATIVE_FOR_TEXT = {
    "Emu3ForConditionalGeneration": ("llama", "text_model.model.", "text_model.lm_head."),
    "Granite4VisionForConditionalGeneration": ("granite", "model.language_model.", "lm_head."),
    "GraniteDoclingForConditionalGeneration": ("granite", "model.text_model.", "lm_head."),
    "PaddleOCRVLForConditionalGeneration": ("llama", "model.", "lm_head."),
}


@pytest.mark.parametrize("architecture", NATIVE_FOR_TEXT)
def test_a_decoder_of_its_own_is_that_of_a_native_family(architecture, tmp_path):
    """The class of the decoder alone: the whole one needs values of its part for images."""
    model_type, prefix, head_prefix = NATIVE_FOR_TEXT[architecture]
    text_class = config_class(architecture).sub_configs["text_config"]
    modules = importlib.import_module(text_class.__module__.replace(".configuration_", ".modeling_"))
    fields = {**SMALL_PHI, "head_dim": 16} if architecture.startswith("Paddle") else SMALL_PHI
    own = text_class(**{name: value for name, value in fields.items() if name != "partial_rotary_factor"})
    if architecture.startswith("Paddle"):
        own.rope_parameters["mrope_section"] = [2, 3, 3]
    torch.manual_seed(0)
    decoder = getattr(modules, text_class.__name__.replace("Config", "Model"))(own).eval()
    for parameter in decoder.parameters():
        parameter.data.copy_(0.12 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    values = own.to_dict()
    part = TEXT_PARTS[architecture]
    assert own.model_type == part.model_type
    config = {"architectures": [architecture], "text_config": values, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = ModelConfig.from_dir(tmp_path)
    plain = {name: value for name, value in values.items() if name not in ("model_type", "architectures")}
    alone = transformers.AutoConfig.for_model(model_type, **{**plain, "tie_word_embeddings": False})
    other = transformers.AutoModelForCausalLM.from_config(alone).eval()
    other.get_decoder().load_state_dict(decoder.state_dict())
    ids = torch.arange(3, 33)[None]
    with torch.inference_mode():
        expected = other.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(decoder(input_ids=ids, use_cache=False).last_hidden_state, expected)
    own_name = decoder_names(tmp_path)
    stored = {f"{prefix}{name}" for name in decoder.state_dict()} | {f"{head_prefix}weight"}
    assert {own_name(name) for name in stored} == set(other.state_dict())
    alone.architectures = [type(other).__name__]
    alone.save_pretrained(tmp_path)
    assert ours == ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("architecture", NATIVE_FOR_TEXT)
def test_fields_that_such_a_text_part_omits_have_the_values_of_its_class(architecture, tmp_path):
    theirs = config_class(architecture).sub_configs["text_config"]()
    config = {"architectures": [architecture], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = ModelConfig.from_dir(tmp_path)
    theirs.architectures = [TEXT_PARTS[architecture].architecture]
    values = {name: value for name, value in theirs.to_dict().items() if name not in ("model_type", "head_dim")}
    head_dim = getattr(theirs, "head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps({**values, **({"head_dim": head_dim} if head_dim else {})}))
    assert replace(ours, tie_word_embeddings=theirs.tie_word_embeddings) == ModelConfig.from_dir(tmp_path)


SMALL_PHI = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
    "pad_token_id": 0,
}
ALSO_NATIVE = {
    ("Qwen2_5OmniThinkerForConditionalGeneration", "qwen2_5_omni_text"): "qwen2",
    ("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_text"): "qwen3_moe",
}
ROTATIONS = {
    "glm4v_moe_text": {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    "hunyuan_vl_text": {"xdrope_section": [2, 2, 2, 2]},
    "qwen2_5_omni_text": {"mrope_section": [2, 3, 3]},
    "qwen3_omni_moe_text": {"mrope_section": [2, 3, 3], "mrope_interleaved": True},
}
SIZES = {
    "glm4v_moe_text": FAMILIES["GLM-4.5"][1],
    "hunyuan_vl_text": {"head_dim": 16},
    "qwen3_omni_moe_text": {**FAMILIES["Qwen3-MoE"][1], "norm_topk_prob": True},
}


@pytest.mark.parametrize(
    ("part", "model_type"), {**{part: as_one for part, as_one in COMPUTED_AS.items() if as_one}, **ALSO_NATIVE}.items()
)
def test_a_class_with_a_decoder_of_its_own_computes_what_another_model_does(part, model_type):
    """Of text alone: its three positions of a token are equal."""
    architecture, own_type = part
    prefix = transformers.CONFIG_MAPPING[own_type].__name__.removesuffix("Config")
    rope = {"rope_type": "default", "rope_theta": 10000.0, **ROTATIONS[own_type]}
    own = family_config(prefix, **SIZES.get(own_type, {}), rope_parameters=rope, tie_word_embeddings=False)
    whole_config = config_class(architecture)()
    whole_config.text_config = own
    with torch.device("meta"):
        whole = getattr(transformers, architecture)(whole_config).eval()
    torch.manual_seed(0)
    decoder = type(whole.get_decoder())(own).eval()
    for parameter in decoder.parameters():
        parameter.data.copy_(0.12 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    config = text_config_of(whole_config, model_type)
    assert config.model_type == model_type
    other = transformers.AutoModelForCausalLM.from_config(config).eval().get_decoder()
    other.load_state_dict(decoder.state_dict())
    whole.model.language_model = decoder
    ids = torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = other(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.equal(whole.model(input_ids=ids, use_cache=False).last_hidden_state, expected)


def test_phi_4_multimodal_is_phi_3_for_text(tmp_path):
    whole = transformers.Phi4MultimodalConfig(**SMALL_PHI, tie_word_embeddings=False)
    whole.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Phi4MultimodalForCausalLM"]}))
    alone = transformers.Phi3Config(**SMALL_PHI, eos_token_id=whole.eos_token_id, tie_word_embeddings=False)
    text = transformers.Phi3ForCausalLM(alone).eval()
    with torch.device("meta"):
        model = transformers.Phi4MultimodalForCausalLM(whole).eval()
    own_name = decoder_names(tmp_path)
    found = {own_name(stored): tensor.shape for stored, tensor in model.state_dict().items() if own_name(stored)}
    assert found == {name: tensor.shape for name, tensor in text.state_dict().items()}
    model.load_state_dict(text.state_dict(), strict=False, assign=True)
    model.model.rotary_emb = text.model.rotary_emb
    ids = torch.arange(3, 33)[None]
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, text(input_ids=ids, use_cache=False).logits)
    ours = ModelConfig.from_dir(tmp_path)
    alone.architectures = ["Phi3ForCausalLM"]
    alone.save_pretrained(tmp_path)
    assert ours == ModelConfig.from_dir(tmp_path)


def test_fields_that_phi_4_multimodal_omits_have_the_values_of_its_class(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Phi4MultimodalForCausalLM"]}))
    ours, theirs = ModelConfig.from_dir(tmp_path), transformers.Phi4MultimodalConfig()
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers, ours.num_kv_heads) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
        theirs.num_key_value_heads,
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.end_token_ids == set(theirs.eos_token_id)


def saved_tensors(model):
    return revert_weight_conversion(model, dict(model.state_dict()))


def silent_configs():
    """Files that say nothing but which model they are, with the model type of its decoder."""
    for model_type, architecture in NATIVE_DECODERS.items():
        yield {"architectures": [architecture], "model_type": model_type}, model_type
        text = {"model_type": model_type}
        yield {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}, model_type
    for architecture, part in TEXT_PARTS.items():
        if part.model_type in CONFIG_MAPPING_NAMES and part.model_type != "qwen3_omni_moe_text":  # 2048 by 28 heads
            yield {"architectures": [architecture], "text_config": {}}, part.model_type


@pytest.mark.parametrize(("config", "model_type"), [*silent_configs()], ids=str)
def test_fields_that_a_file_omits_have_the_values_of_its_class(config, model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.CONFIG_MAPPING[model_type]()
    ours = ModelConfig.from_dir(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
    )
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        head_dim,
    )
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    if getattr(theirs, "intermediate_size", None) is not None:
        assert ours.intermediate_size == theirs.intermediate_size
    ropes = theirs.rope_parameters
    thetas = {rope["rope_theta"] for rope in ([ropes] if "rope_theta" in ropes else ropes.values())}
    assert {rope.theta for rope in ours.traits.ropes if rope is not None} == thetas


def test_a_text_part_without_a_model_type_has_the_one_of_its_class(tmp_path):
    for architecture, model_type in WITH_ANY_DECODER.items():
        assert config_class(architecture)().get_text_config().model_type == model_type
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_dir(tmp_path).architecture == "LlamaForCausalLM"


def test_the_tables_name_what_there_is():
    architectures = {*TEXT_PARTS, *THINKERS.values(), *WITH_ANY_DECODER, *(name for name, _ in COMPUTED_AS)}
    assert all(hasattr(transformers, name) for name in architectures)
    assert {*NATIVE_DECODERS, *WITH_ANY_DECODER.values(), *filter(None, COMPUTED_AS.values())} <= {
        *CONFIG_MAPPING_NAMES
    }
    assert set(NATIVE_DECODERS.values()) == set(NATIVE_FAMILIES)
    assert {part.architecture for part in TEXT_PARTS.values()} <= set(NATIVE_FAMILIES)
