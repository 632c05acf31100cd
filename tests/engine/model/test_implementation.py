"""What computes a model, and which are refused: by config.json without torch, then by a probe without weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import CheckpointError, ConfigError
from engine.model.implementation import choose_implementation
from engine.parallel.layout import RankLayout
from tests.support.engine.families import (
    REFUSED,
    STATEFUL_FAMILIES,
    TRANSFORMERS_FAMILIES,
    auto_class,
    family_config,
    save_family,
)


def config_json(path: Path, **fields: object) -> Path:
    (path / "config.json").write_text(json.dumps(fields))
    return path


def saved_config(path: Path, prefix: str, **fields: object) -> Path:
    config = family_config(prefix, **fields)
    config.architectures = [auto_class(config)._model_mapping[type(config)].__name__]
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("architecture", "model_impl", "expected"),
    [
        ("LlamaForCausalLM", "auto", "chairlift"),
        ("LlamaForCausalLM", "chairlift", "chairlift"),
        ("LlamaForCausalLM", "transformers", "transformers"),
        ("GPT2LMHeadModel", "auto", "transformers"),
        ("GPT2LMHeadModel", "chairlift", "chairlift"),  # which refuses it
    ],
)
def test_auto_prefers_the_native_decoder(tmp_path, architecture, model_impl, expected):
    assert choose_implementation(config_json(tmp_path, architectures=[architecture]), model_impl) == expected


@pytest.mark.parametrize(
    ("architecture", "activation", "expected"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "chairlift"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "transformers"),
        ("Qwen3_5ForCausalLM", {}, "chairlift"),
        ("Qwen3_5ForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "transformers"),  # it is the convolution's too
        ("Qwen3NextForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "transformers"),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, "chairlift"),  # which means the other one
        ("GemmaForCausalLM", {"hidden_act": "relu"}, "transformers"),
        ("Gemma3ForCausalLM", {"hidden_act": "gelu"}, "chairlift"),  # which reads another field
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "transformers"),
    ],
)
def test_an_activation_that_the_native_decoder_lacks_is_left_to_transformers(
    tmp_path, architecture, activation, expected
):
    path = config_json(tmp_path, architectures=[architecture], **activation)
    assert choose_implementation(path, "auto") == expected
    assert choose_implementation(path, "chairlift") == "chairlift"  # which refuses it


@pytest.mark.parametrize(
    ("architecture", "model_type", "expected"),
    [
        ("LlavaForConditionalGeneration", None, "chairlift"),
        ("LlavaForConditionalGeneration", "mistral", "chairlift"),
        ("InternVLForConditionalGeneration", "qwen3_moe", "chairlift"),
        ("InternVLForConditionalGeneration", "gpt_oss", "chairlift"),
        ("InternVLForConditionalGeneration", "internlm2", "transformers"),  # whose probe refuses it
        ("Cohere2VisionForConditionalGeneration", None, "transformers"),
        ("Glm46VForConditionalGeneration", "glm4v_text", "chairlift"),
        ("Glm46VForConditionalGeneration", "glm4v_moe_text", "transformers"),
    ],
)
def test_text_parts_are_computed_by_the_decoder_that_they_name(tmp_path, architecture, model_type, expected):
    text = {} if model_type is None else {"model_type": model_type}
    path = config_json(tmp_path, architectures=[architecture], text_config=text)
    assert choose_implementation(path, "auto") == expected
    if architecture != "Glm46VForConditionalGeneration":
        assert choose_implementation(path, "transformers") == "transformers"


GEMMA_4 = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"model_type": "gemma4_text"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM: its attention does not go through .*; serve"),
        ({"architectures": ["MptForCausalLM"]}, "attention does not go through"),
        ({"architectures": ["GPTNeoForCausalLM"]}, "attention does not go through"),
        ({"architectures": ["FalconForCausalLM"]}, "attention does not go through"),
        ({"architectures": ["RobertaForCausalLM"]}, "positions begin behind the id of its padding token"),
        ({"architectures": ["MambaForCausalLM"]}, "keep state that is no KV cache"),
        ({"architectures": ["Zamba2ForCausalLM"]}, "keep state that is no KV cache"),
        (
            {"architectures": ["XForCausalLM"], "layer_types": ["recurrent", "full_attention"]},
            "layer_types has recurrent: ",
        ),
        ({"architectures": ["XForCausalLM"], "layer_types": ["chunked_attention"]}, "chunked_attention, which"),
        ({"architectures": ["XForCausalLM"], "index_topk": 2048}, "index_topk is 2048: .* by an indexer"),
        ({"architectures": ["XForCausalLM"], "rope_scaling": {"type": "dynamic"}}, "longest request of the batch"),
        (
            {"architectures": ["XForCausalLM"], "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "longest request of the batch",
        ),
        ({"architectures": ["XForCausalLM"], "auto_map": {"AutoModel": "x.Y"}, "model_type": "x"}, "not executed"),
        (
            {"architectures": ["FooForCausalLM"], "model_type": "foo"},
            "model_type is 'foo', which transformers 5.* not have",
        ),
        ({"architectures": ["FooForCausalLM"], "model_type": ["x"]}, r"model_type is \['x'\], which transformers"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "no causal language model"),
        (
            {"architectures": ["BertModel"]},
            "is BertModel: embedding models, classifiers and encoders are not supported",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "classifiers and encoders are not supported"),
        ({"architectures": ["BlipForConditionalGeneration"]}, "models of images, sound or an encoder are not"),
        ({"architectures": ["MllamaForConditionalGeneration"]}, "some of its layers attend to images instead of"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "its attention is not causal; serve another model"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "its attention is in chunks, which the paged"),
        (
            {"architectures": ["XForConditionalGeneration"], "text_config": {"index_topk": 2048}},
            "text_config: index_topk is 2048: .* by an indexer",
        ),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "text_config is missing: LlavaForConditionalGeneration"),
        ({"architectures": ["InternVLChatModel"], "llm_config": []}, r"llm_config is \[\], expected an object"),
        ({"architectures": ["MiniCPMO"], "auto_map": {"AutoModel": "x.Y"}}, "names code of the checkpoint"),
        ({"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"model_type": "x"}}, "models of images"),
        (
            {**GEMMA_4, "text_config": {"model_type": "gemma4_text", "layer_types": ["recurrent"]}},
            r"text_config: layer_types has recurrent: ",
        ),
        ({"architectures": [[]], "text_config": {}}, r"architectures is \[\[\]\], expected a list of names"),
        ({**GEMMA_4, "text_config": {"model_type": []}}, "models of images"),
        ({**GEMMA_4, "quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits is missing"),
        ({**GEMMA_4, "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is mxfp4, which is not"),
    ],
)
def test_config_json_alone_refuses_by_name(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message) as error:
        choose_implementation(config_json(tmp_path, **fields), "auto")
    assert "\n" not in str(error.value)


def test_code_of_a_model_type_that_transformers_has_is_not_needed(tmp_path):
    path = config_json(tmp_path, architectures=["Phi3ForCausalLM"], auto_map={"AutoModel": "x.Y"}, model_type="phi3")
    assert choose_implementation(path, "transformers") == "transformers"


def test_several_ranks_are_refused(tmp_path):
    path = config_json(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 .* one device: omit it"):
        choose_implementation(path, "auto", layout=RankLayout(2))


def test_the_setting_that_keeps_a_native_architecture_from_chairlift_is_named(tmp_path, monkeypatch):
    path = config_json(tmp_path, architectures=["LlamaForCausalLM"], hidden_act="gelu")
    with pytest.raises(ConfigError, match=r"not supported for LlamaForCausalLM with hidden_act 'gelu', which"):
        choose_implementation(path, "auto", layout=RankLayout(num_stages=2))
    monkeypatch.setattr("engine.model.implementation.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM with hidden_act 'gelu' is computed by transformers"):
        choose_implementation(path, "auto")


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.model.implementation.find_spec", lambda _name: None)
    path = config_json(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(ConfigError, match=r"pip install 'chairlift\[transformers\]'"):
        choose_implementation(path, "auto")


def test_a_refusal_imports_neither_torch_nor_transformers(tmp_path):
    """The engine's own main, up to its exit."""
    path = config_json(tmp_path, architectures=["BloomForCausalLM"], model_type="bloom")
    code = (
        "import sys; from engine.__main__ import main\n"
        f"status = main(['--model', {str(path)!r}, '--port', '0', '--device', 'cpu'])\n"
        "print(status, sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "2 []"
    assert "BloomForCausalLM: its attention does not go through" in done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_each_refused_family_is_refused_by_its_configuration_or_by_the_probe(tmp_path, name):
    from engine.model.transformers_probe import TransformersConfig

    prefix, fields = REFUSED[name]
    path = saved_config(tmp_path, prefix, **fields)
    with pytest.raises(CheckpointError, match=r"KV cache|attend|attention|experts"):
        choose_implementation(path, "auto")
    with pytest.raises(CheckpointError, match="cannot be served by transformers"):
        TransformersConfig.from_dir(path)  # if a table did not name it


@pytest.mark.parametrize("name", TRANSFORMERS_FAMILIES)
def test_each_served_family_passes_both(tmp_path, name):
    from engine.model.transformers_probe import TransformersConfig

    prefix, fields = TRANSFORMERS_FAMILIES[name]
    path = saved_config(tmp_path, prefix, **fields)
    assert choose_implementation(path, "transformers") == "transformers"
    config = TransformersConfig.from_dir(path)
    assert len(config.shape.layers) == fields.get("num_hidden_layers", 3)
    assert config.shape.vocab_size == 307
    windows = set(config.sliding_windows)
    assert windows <= {None, 24}
    assert (24 in windows) == (fields.get("sliding_window") == 24)
    is_unrecordable = any("expert" in field or field == "global_head_dim" for field in fields)
    assert (config.unrecordable is not None) == is_unrecordable, config.unrecordable


NATIVE_WITH_STATE = ("Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")


@pytest.mark.parametrize("name", STATEFUL_FAMILIES)
def test_layers_with_state_are_found(tmp_path, name):
    from engine.model.transformers_probe import TransformersConfig

    prefix, fields = STATEFUL_FAMILIES[name]
    path = saved_config(tmp_path, prefix, **fields)
    assert choose_implementation(path, "auto") == ("chairlift" if name in NATIVE_WITH_STATE else "transformers")
    config = TransformersConfig.from_dir(path)
    assert config.stateful_layers
    assert len(config.attention_layers) == len(config.shape.layers) >= 1
    assert config.shape.state_bytes == sum(4 * shape.numel() for one in config.stateful_layers for shape in one.shapes)
    assert config.unrecordable == "its layers keep state of each request"


def test_end_tokens_are_those_of_both_files(tmp_path):
    from engine.model.transformers_probe import TransformersConfig

    path = saved_config(tmp_path, "GPT2", **TRANSFORMERS_FAMILIES["GPT-2"][1])
    assert TransformersConfig.from_dir(path).shape.end_token_ids == {2}
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert TransformersConfig.from_dir(path).shape.end_token_ids == {2, 5, 7}


def test_a_window_that_only_a_mask_has_is_refused_where_it_matters(tmp_path):
    """Phi-mini-MoE has one of 2,047 of 4,096 positions, Phi-3.5-MoE one of all."""
    from engine.model.transformers_probe import TransformersConfig

    prefix, fields = TRANSFORMERS_FAMILIES["Phi-3.5-MoE"]
    path = saved_config(tmp_path, prefix, **fields, sliding_window=24)
    with pytest.raises(CheckpointError, match=r"sliding_window is 24 .* max_position_embeddings in config.json to 24"):
        TransformersConfig.from_dir(path)
    saved_config(tmp_path, prefix, **{**fields, "sliding_window": 24, "max_position_embeddings": 24})
    assert TransformersConfig.from_dir(path).sliding_windows == (None, None, None)


def load_by_transformers(path):
    import torch

    from engine.model.transformers_model import TransformersModel
    from engine.model.transformers_probe import TransformersConfig
    from kernels.families import reference_ops

    return TransformersModel(
        TransformersConfig.from_dir(path),
        reference_ops(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
    )


@pytest.mark.parametrize("prefix", ["Bart", "Marian"])
def test_a_model_that_counts_positions_itself_is_refused(tmp_path, prefix):
    """Its forward ignores `position_ids`: a token would have the position of its place in the step."""
    sizes = {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    save_family(tmp_path, family_config(prefix, **sizes))
    with pytest.raises(CheckpointError, match=r"with its place in the batch: .* counts positions itself"):
        load_by_transformers(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path):
    prefix, fields = TRANSFORMERS_FAMILIES["OLMo"]
    save_family(tmp_path, family_config(prefix, **fields))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"\d+ tensors are missing, the first is model\.layers\.3"):
        load_by_transformers(tmp_path)
