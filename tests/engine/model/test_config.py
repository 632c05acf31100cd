"""config.json and generation_config.json: fields, defaults and errors."""

import re

import pytest
import torch
import transformers

from engine.errors import CheckpointError
from engine.model.architectures import FAMILIES
from engine.model.config import ModelConfig
from engine.model.rope import RopeConfig
from tests.support.engine.checkpoints import LLAMA3


def test_defaults_of_a_minimal_config(read):
    config = read()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.traits.ropes[0] == RopeConfig(theta=10000.0)
    assert config.checkpoint_dtype == "float32"
    assert not config.tie_word_embeddings
    assert config.end_token_ids == {2}


def test_null_counts_as_absent(read):
    assert read(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None) == read()


_WITHOUT_WINDOWS = (
    "LlamaForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    "GemmaForCausalLM",
)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 128},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        {"num_key_value_heads": None, "head_dim": None},
        {"num_key_value_heads": 16},
        {"eos_token_id": None},
        {"eos_token_id": [3, 4]},
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_absent_and_null_fields_have_the_defaults_of_transformers(read, tmp_path, architecture, fields):
    if architecture == "Qwen3ForCausalLM" and "head_dim" in fields:
        fields = {**fields, "head_dim": 32}  # transformers takes no null there
    if architecture == "GemmaForCausalLM" and "head_dim" in fields:
        fields = {"num_key_value_heads": 8}  # nor here
    if architecture == "Gemma2ForCausalLM" and "head_dim" in fields:
        fields = {"attn_logit_softcapping": None, "query_pre_attn_scalar": 64}  # nor here
    if architecture == "Gemma3ForCausalLM" and "head_dim" in fields:
        fields = {"rope_local_base_freq": 500.0, "rope_theta": 5e4, "sliding_window_pattern": 2}  # nor here
    if architecture == "GptOssForCausalLM" and "head_dim" in fields:
        fields = {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 5e4,
        }
    if architecture.startswith("Glm") and "head_dim" in fields:
        fields = {"partial_rotary_factor": 0.25, "num_key_value_heads": 8}  # nor here
    if architecture in ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
        # nor here; the last of three layers attends
        fields = {**fields, "full_attention_interval": 3} | ({"head_dim": 32} if "head_dim" in fields else {})
    takes_no_null = (
        *("MistralForCausalLM", "MixtralForCausalLM"),
        *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    )
    if architecture in takes_no_null and "num_key_value_heads" in fields:
        fields = {**fields, "num_key_value_heads": 8}
    shape = {"hidden_size": 1024, "num_attention_heads": 64}
    model_type = getattr(transformers, architecture).config_class.model_type
    ours = read(architectures=[architecture], model_type=model_type, **shape, **fields)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 1024 // 64)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3
    for rope, kind in zip(ours.traits.ropes, kinds, strict=True):
        theta = theirs.rope_parameters.get(kind, theirs.rope_parameters)["rope_theta"]
        assert rope is None or rope.theta == theta
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    ids = theirs.eos_token_id
    assert ours.end_token_ids == (set() if ids is None else {ids} if isinstance(ids, int) else set(ids))
    window = getattr(theirs, "sliding_window", None) if architecture not in _WITHOUT_WINDOWS else None
    assert ours.traits.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.traits.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert ours.traits.sliding_windows == expected


def test_end_tokens_come_from_generation_config_alone_if_config_has_none(read):
    assert read(generation_config={}).end_token_ids == frozenset()
    assert read(generation_config={"eos_token_id": 7}).end_token_ids == {7}


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_checkpoint_dtype_under_both_names(read, name):
    assert read(**{name: "bfloat16"}).checkpoint_dtype == "bfloat16"


def test_end_token_ids_come_from_both_files(read):
    assert read({"eos_token_id": [7, 9]}, eos_token_id=2).end_token_ids == {2, 7, 9}
    assert read({"eos_token_id": 7}).end_token_ids == {7}


QWEN = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"sliding_window": 8}, (None, None, None)),  # Llama has none
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        (QWEN, (None, None, None)),
        ({**QWEN, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8)),
        (
            {
                **QWEN,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ({**QWEN, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, (None, None, None)),
    ],
)
def test_sliding_windows_by_architecture(read, overrides, windows):
    assert read(**{"num_key_value_heads": 4, **overrides}).traits.sliding_windows == windows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is ['GPT2LMHeadModel'], supported are LlamaForCausalLM, Mistral",
        ),
        ({"architectures": "absent"}, "architectures is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer >= 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "hidden_size is 66, not a multiple of num_attention_heads 4"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported are silu, gelu_pytorch_tanh"),
        ({"dtype": "float8"}, "dtype is 'float8', supported are float32, float16, bfloat16"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, expected a number > 0"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300, expected a number > 0, of float32: 1.2e-38 to 3.4e38"),
        ({"rope_theta": 1e39}, "rope_theta is 1e+39, expected a number > 0, of float32: 1.2e-38 to 3.4e38"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id or a list of them"),
        (
            {**QWEN, "layer_types": ["full_attention"]},
            "layer_types is ['full_attention'], expected a list with one entry for each of 3",
        ),
        (
            {**QWEN, "layer_types": ["full_attention", "full_attention", "mamba"]},
            "layer_types has mamba, supported are full_attention",
        ),
        (
            {"rope_scaling": {"rope_type": "ntk"}},
            "rope_scaling: rope_type is 'ntk', supported are default, linear, llama3, yarn, longrope",
        ),
        ({"rope_parameters": {**LLAMA3, "factor": "absent"}}, "rope_parameters: factor is 'absent', expected a number"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor is 4.0, expected less than high_freq_factor 4.0",
        ),
        ({"rope_scaling": 3}, "rope_scaling is 3, expected an object"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quant_method is ['fp8'], supported are fp8, gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', whose frequencies follow"),
    ],
)
def test_bad_field_is_named(read, tmp_path, overrides, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read(**overrides)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file; a checkpoint is a folder"):
        ModelConfig.from_dir(tmp_path)


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5, num_experts is 4"),
        ({"num_local_experts": 4}, "num_experts_per_tok is 8, num_local_experts is 4"),
        ({"num_experts": 5000}, "num_experts is 5000, the maximum is 4096"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0, expected an integer >= 1"),
        ({"mlp_only_layers": [0, "1"]}, "mlp_only_layers is [0, '1'], expected a list of numbers of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an integer >= 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    ],
)
def test_a_bad_field_of_a_mixture_of_experts_is_named(read, overrides, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(**MOE, **overrides)


def test_windows_of_qwen2_moe_are_those_of_transformers(read, tmp_path):
    """Every other one of the first layers, where the file does not list them."""
    fields = {"num_hidden_layers": 6, "sliding_window": 24, "use_sliding_window": True, "max_window_layers": 3}
    fields["num_key_value_heads"] = 2
    ours = read(architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", **fields)
    kinds = transformers.AutoConfig.from_pretrained(tmp_path).layer_types
    assert ours.traits.sliding_windows == tuple(24 if kind == "sliding_attention" else None for kind in kinds)
    assert kinds.count("sliding_attention") == 2


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_absent_sizes_of_experts_and_of_the_shared_one_are_those_of_transformers(read, tmp_path, architecture):
    """Also which probabilities add up to one."""
    config_class = getattr(transformers, architecture).config_class
    absent = dict.fromkeys((*SIZES, "max_position_embeddings"), "absent")
    ours = read(architectures=[architecture], model_type=config_class.model_type, **absent)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    mixture = ours.traits.mixtures[0]
    assert mixture.num_experts == theirs.num_experts
    assert mixture.top_k == theirs.num_experts_per_tok
    assert mixture.inner_size == theirs.moe_intermediate_size
    assert mixture.shared_size == theirs.shared_expert_intermediate_size
    assert mixture.normalizes == getattr(theirs, "norm_topk_prob", True)
    assert (ours.hidden_size, ours.num_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.num_heads, ours.vocab_size) == (theirs.num_attention_heads, theirs.vocab_size)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    inner = "intermediate_size" if architecture != "Qwen3_5MoeForCausalLM" else "shared_expert_intermediate_size"
    assert ours.intermediate_size == getattr(theirs, inner)


def test_layers_with_experts_are_those_of_transformers(read, tmp_path):
    sparse = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = read(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, **MOE, **sparse)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    has_experts = [hasattr(layer.mlp, "experts") for layer in theirs.model.layers]
    assert [mixture is not None for mixture in config.traits.mixtures] == has_experts
    assert sum(has_experts) == 2
