"""How llama.cpp stores the models of an architecture: what its metadata mean in config.json, and names of tensors.

Facts about llama.cpp are those of its converter (conversion/) and its models (src/models/).
"""

from collections.abc import Callable

from engine.model.gguf_architecture import EXPERTS, POST_NORMS, Fields, GgufArchitecture
from engine.model.gguf_deepseek import deepseek2
from engine.model.gguf_file import GgufHeader
from engine.model.gguf_gemma import GEMMA3N, GEMMA4
from engine.model.gguf_granite import HYBRID, granite, granitemoe
from engine.model.gguf_hybrids import FALCON_H1, NEMOTRON_H
from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_states import mamba
from engine.model.gguf_transformers import MINISTRAL3, OF_TRANSFORMERS

_GLM4_NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}

_REASONS = {
    "its layers keep state that is no KV cache": (
        "arwkv7", "mamba", "mamba2", "minimax-01", "rwkv6", "rwkv6qwen2", "rwkv7",
    ),
    "its attention adds biases by the distance of tokens": ("bloom", "mpt", "refact"),
    "its attention does not go through the attention interface of transformers": ("falcon",),
    "its layers choose keys by an indexer, whose cache is no KV cache": (
        "deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp",
    ),
    "its experts do not go through the interface of transformers for experts": ("dbrx",),
    "it drafts tokens of another model, whose keys and values it takes": ("gemma4-assistant",),
    "its attention is in chunks, which the paged attention does not support": ("llama4",),
    "tokens see those behind them too: its attention is not causal": (
        "bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe",
        "llama-embed", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5", "t5encoder",
    ),
}  # fmt: skip
_REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}
"""Architectures of llama.cpp that cannot be served from safetensors either."""

_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_RULES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GATES = {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_FUSED_GATES = {"ssm_ba": "linear_attn.in_proj_ba"}


def gguf_architecture(header: GgufHeader) -> tuple[GgufArchitecture, GgufMetadata]:
    """Returns the architecture of a file, and its values.

    Raises: CheckpointError: it is not supported.
    """
    name = header.metadata.raw("general.architecture")
    if isinstance(name, str) and name in _REFUSED:
        raise header.metadata.error(
            "general.architecture", f"is {name!r}, which cannot be served: {_REFUSED[name]}; serve another model"
        )
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise header.metadata.error(
            "general.architecture",
            f"is {name!r}, supported in GGUF are {', '.join(_ARCHITECTURES)}; serve the original checkpoint in "
            "safetensors",
        )
    metadata = GgufMetadata(header, name)
    return _ARCHITECTURES[name](metadata), metadata


def _dense(metadata: GgufMetadata) -> Fields:
    """No windows and no experts."""
    for name in ("attention.sliding_window", "expert_count"):
        metadata.refuse_others(name, 0)
    return {}


def _experts(metadata: GgufMetadata, count: str, *, has_shared: bool = False) -> Fields:
    """Experts in all layers; `count` is the field of config.json for their number. No windows."""
    metadata.refuse_others("attention.sliding_window", 0)
    if not has_shared:
        metadata.refuse_others("expert_shared_feed_forward_length", 0)
    return {count: metadata.integer("expert_count"), "num_experts_per_tok": metadata.integer("expert_used_count")}


def _mixtral(metadata: GgufMetadata) -> Fields:
    return {**_experts(metadata, "num_local_experts"), "sliding_window": None}


def _qwen3moe(metadata: GgufMetadata) -> Fields:
    return {
        **_experts(metadata, "num_experts"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _shared_expert(metadata: GgufMetadata) -> Fields:
    """Experts in all layers, and one that all tokens share."""
    return {
        **_experts(metadata, "num_experts", has_shared=True),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }


def _qwen2moe(metadata: GgufMetadata) -> Fields:
    return {**_shared_expert(metadata), "norm_topk_prob": False}


def _qwen3next(metadata: GgufMetadata) -> Fields:
    return {**_shared_expert(metadata), **_delta_rules(metadata), "norm_topk_prob": True, "fuses_qkvz": False}


def _qwen35moe(metadata: GgufMetadata) -> Fields:
    return {**_shared_expert(metadata), **_delta_rules(metadata), "tiles_linear_heads": True}


def _gpt_oss(metadata: GgufMetadata) -> Fields:
    scaling = metadata.rope_scaling() or {"rope_type": "default"}
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "stacks_experts": False,
        "sliding_window": metadata.sliding_window,
        "layer_types": metadata.layer_types(2),
        "rope_scaling": {**scaling, "truncate": False},  # as published; llama.cpp rounds its limits
    }


def _mistral3(metadata: GgufMetadata) -> Fields:
    return {**_dense(metadata), "sliding_window": None}


def _glm4(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("rope.dimension_sections", "absent")  # of models for images, whose rows are in halves
    return _dense(metadata)


def _phi3(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("expert_count", 0)
    return {
        "sliding_window": metadata.sliding_window,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", metadata.integer("context_length")
        ),
    }


def _gemma(metadata: GgufMetadata, largest: int) -> Fields:
    """Fields of both generations; `largest` is the number of layers of the model whose scale is not by its heads."""
    is_largest = metadata.num_layers == largest
    size = metadata.integer("embedding_length") // metadata.num_heads if is_largest else metadata.head_dim
    return {"query_pre_attn_scalar": size}


def _gemma2(metadata: GgufMetadata) -> Fields:
    return {
        **_gemma(metadata, 46),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "layer_types": metadata.layer_types(2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: GgufMetadata) -> Fields:
    fields = {
        **_gemma(metadata, 62),
        "sliding_window": metadata.sliding_window,
        "layer_types": metadata.layer_types(6),
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }
    if metadata.sliding_window is None:
        fields["layer_types"] = ["full_attention"] * metadata.num_layers
    if "final_logit_softcapping" in metadata:
        fields["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return fields


def _qwen35(metadata: GgufMetadata) -> Fields:
    return {**_dense(metadata), **_delta_rules(metadata), "tiles_linear_heads": True}


def _delta_rules(metadata: GgufMetadata) -> Fields:
    sizes = mamba(metadata)
    kinds = {True: "full_attention", False: "linear_attention"}
    return {
        "layer_types": [kinds[attends] for attends in metadata.attending_layers(4)],
        "linear_conv_kernel_dim": sizes.width,
        "linear_key_head_dim": sizes.state_size,
        "linear_num_key_heads": sizes.num_groups,
        "linear_num_value_heads": sizes.num_heads,
        "linear_value_head_dim": sizes.inner // sizes.num_heads,
    }


def _olmo3(metadata: GgufMetadata) -> Fields:
    return {"sliding_window": metadata.sliding_window, "layer_types": metadata.layer_types(4)}


_LLAMA = GgufArchitecture("LlamaForCausalLM", _dense, rotates_pairs=True)
_MIXTRAL = GgufArchitecture(
    "MixtralForCausalLM",
    _mixtral,
    {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    rotates_pairs=True,
)
_QWEN2 = GgufArchitecture("Qwen2ForCausalLM", _dense)
_QWEN3 = GgufArchitecture("Qwen3ForCausalLM", _dense)
_QWEN3MOE = GgufArchitecture("Qwen3MoeForCausalLM", _qwen3moe, EXPERTS)
_MISTRAL3 = GgufArchitecture("MistralForCausalLM", _mistral3, rotates_pairs=True)
_OLMO2_NAMES = {name: POST_NORMS[name] for name in ("post_attention_norm", "post_ffw_norm")}
_OLMO2 = GgufArchitecture("Olmo2ForCausalLM", _dense, _OLMO2_NAMES)
_OLMO3 = GgufArchitecture("Olmo3ForCausalLM", _olmo3, _OLMO2_NAMES)


def _always(architecture: GgufArchitecture) -> Callable[[GgufMetadata], GgufArchitecture]:
    return lambda _: architecture


_ARCHITECTURES: dict[str, Callable[[GgufMetadata], GgufArchitecture]] = {
    "llama": lambda metadata: _MIXTRAL if metadata.num_experts else _LLAMA,
    "mistral3": lambda metadata: MINISTRAL3 if metadata.raw("attention.temperature_scale", 0) else _MISTRAL3,
    "qwen2": _always(_QWEN2),
    "qwen2vl": _always(_QWEN2),  # of a text, all three positions of a token are equal
    "qwen3": _always(_QWEN3),
    "qwen3vl": _always(_QWEN3),
    "qwen2moe": _always(GgufArchitecture("Qwen2MoeForCausalLM", _qwen2moe, EXPERTS | _SHARED_EXPERT)),
    "qwen3moe": _always(_QWEN3MOE),
    "qwen3vlmoe": _always(_QWEN3MOE),
    "gpt-oss": _always(
        GgufArchitecture(
            "GptOssForCausalLM",
            _gpt_oss,
            {
                "attn_sinks.weight": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                **EXPERTS,
                "ffn_gate_inp": "mlp.router",
            },
        )
    ),
    "qwen3next": _always(
        GgufArchitecture(
            "Qwen3NextForCausalLM",
            _qwen3next,
            EXPERTS | _SHARED_EXPERT | _DELTA_RULES | _FUSED_GATES,
            norm_offset=1.0,
            rotates_parts=True,
        )
    ),
    "qwen35": _always(
        GgufArchitecture("Qwen3_5ForCausalLM", _qwen35, _DELTA_RULES | _GATES, norm_offset=1.0, rotates_parts=True)
    ),
    "qwen35moe": _always(
        GgufArchitecture(
            "Qwen3_5MoeForCausalLM",
            _qwen35moe,
            EXPERTS | _SHARED_EXPERT | _DELTA_RULES | _GATES,
            norm_offset=1.0,
            rotates_parts=True,
        )
    ),
    "phi3": _always(
        GgufArchitecture(
            "Phi3ForCausalLM",
            _phi3,
            {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            rotates_parts=True,
        )
    ),
    "glm4": _always(GgufArchitecture("Glm4ForCausalLM", _glm4, _GLM4_NAMES, rotates_parts=True)),
    "smollm3": _always(GgufArchitecture("SmolLM3ForCausalLM", _dense, rotates_pairs=True)),
    "granite": _always(GgufArchitecture("GraniteForCausalLM", granite, rotates_pairs=True)),
    "granitehybrid": _always(HYBRID),
    "granitemoe": granitemoe,
    "falcon-h1": _always(FALCON_H1),
    "nemotron_h": _always(NEMOTRON_H),
    "nemotron_h_moe": _always(NEMOTRON_H),
    "gemma": _always(GgufArchitecture("GemmaForCausalLM", _dense, norm_offset=1.0)),
    "gemma2": _always(GgufArchitecture("Gemma2ForCausalLM", _gemma2, POST_NORMS, norm_offset=1.0)),
    "gemma3": _always(GgufArchitecture("Gemma3ForCausalLM", _gemma3, POST_NORMS, norm_offset=1.0)),
    "gemma3n": _always(GEMMA3N),
    "gemma4": _always(GEMMA4),
    "olmo2": lambda metadata: _OLMO2 if metadata.sliding_window is None else _OLMO3,
    "deepseek2": deepseek2,
    **{name: _always(architecture) for name, architecture in OF_TRANSFORMERS.items()},
}
"""Architectures by general.architecture; some depend on other values too."""
