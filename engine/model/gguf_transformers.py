"""Architectures in GGUF that transformers computes: what their metadata mean in config.json, and names of tensors.

The names are those of the modules of transformers; linear layers stay in blocks.
"""

from collections.abc import Callable
from functools import partial

from engine.model.gguf_architecture import EXPERTS, SHARED_EXPERTS, Fields, GgufArchitecture
from engine.model.gguf_metadata import GgufMetadata

_EXAONE4_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_LFM2_MODEL = {"token_embd_norm.weight": "model.embedding_norm.weight"}
_GLM4MOE_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **EXPERTS,
    **SHARED_EXPERTS,
}
_DOTS1_NAMES = {name: module for name, module in _GLM4MOE_NAMES.items() if name != "post_attention_norm"}
_MINIMAX_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_ERNIE4_5_MOE_NAMES = {
    "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
    **EXPERTS,
    **SHARED_EXPERTS,
}
_PHI2_NAMES = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_PHI2_MODEL = {f"output_norm.{part}": f"model.final_layernorm.{part}" for part in ("weight", "bias")}
_STABLELM_NAMES = {
    "attn_q_norm": "self_attn.q_layernorm.norms.{}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{}",
}
_SIGMOID = 2
"""Of expert_gating_func."""

_HUNYUAN_NAMES = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def _all_attend(metadata: GgufMetadata) -> Fields:
    """No windows and no experts."""
    for name in ("attention.sliding_window", "expert_count"):
        metadata.refuse_others(name, 0)
    return {}


def _windows(metadata: GgufMetadata) -> Fields:
    """Windows in all layers but every fourth, if the file does not list them; no experts."""
    metadata.refuse_others("expert_count", 0)
    if metadata.sliding_window is None:
        return {"sliding_window": None, "layer_types": ["full_attention"] * metadata.num_layers}
    return {"sliding_window": metadata.sliding_window, "layer_types": metadata.layer_types(4)}


def _cohere(metadata: GgufMetadata, read_layers: Callable[[GgufMetadata], Fields]) -> Fields:
    return {
        **read_layers(metadata),
        "layer_norm_eps": metadata.norm_epsilon,
        "logit_scale": metadata.number("logit_scale"),
    }


def _ministral3(metadata: GgufMetadata) -> Fields:
    scaling = metadata.rope_scaling()
    if scaling is None or scaling["rope_type"] != "yarn":
        raise metadata.error("rope.scaling.type", "is not yarn, as attention.temperature_scale requires")
    scaling["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
    return {**_all_attend(metadata), "rope_scaling": scaling}


def _mixture(metadata: GgufMetadata) -> Fields:
    """Experts, behind layers without; no windows."""
    metadata.refuse_others("attention.sliding_window", 0)
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _olmoe(metadata: GgufMetadata) -> Fields:
    fields = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }
    metadata.refuse_others("attention.sliding_window", 0)
    return {**fields, "norm_topk_prob": False}


def _glm4moe(metadata: GgufMetadata) -> Fields:
    fields = _mixture(metadata)
    metadata.refuse_others("expert_gating_func", _SIGMOID)
    metadata.refuse_others("expert_group_count", 1)
    return {
        **fields,
        "n_routed_experts": fields["num_experts"],
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
    }


def _dots1(metadata: GgufMetadata) -> Fields:
    fields = _glm4moe(metadata)
    return {**fields, "n_group": 1, "topk_group": 1}


def _minimax_m2(metadata: GgufMetadata) -> Fields:
    fields = _mixture(metadata)
    metadata.refuse_others("expert_gating_func", _SIGMOID)
    return {**fields, "num_local_experts": fields["num_experts"], "intermediate_size": fields["moe_intermediate_size"]}


def _ernie4_5_moe(metadata: GgufMetadata) -> Fields:
    fields = _mixture(metadata)
    return {
        **fields,
        "moe_num_experts": fields["num_experts"],
        "moe_k": fields["num_experts_per_tok"],
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0, minimum=0),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, minimum=0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 1),
    }


def _lfm2moe(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("expert_gating_func", _SIGMOID)
    return {
        **_mixture(metadata),
        **_convolutions(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0, minimum=0),
    }


def _lfm2(metadata: GgufMetadata) -> Fields:
    return {**_all_attend(metadata), **_convolutions(metadata), "block_auto_adjust_ff_dim": False}


def _convolutions(metadata: GgufMetadata) -> Fields:
    """Layers without heads for keys and values are short convolutions."""
    return {
        "layer_types": ["full_attention" if count else "conv" for count in metadata.kv_heads_by_layer()],
        "norm_eps": metadata.norm_epsilon,
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
    }


def _starcoder2(metadata: GgufMetadata) -> Fields:
    """All published models have this window, which the converter does not write."""
    metadata.refuse_others("expert_count", 0)
    return {
        "norm_epsilon": metadata.norm_epsilon,
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
    }


def _layer_norms(metadata: GgufMetadata, field: str) -> Fields:
    """Norms with means, whose epsilon is in a field of config.json; no windows and no experts."""
    return {**_all_attend(metadata), field: metadata.norm_epsilon}


def _olmo(metadata: GgufMetadata) -> Fields:
    clamp = {"clip_qkv": metadata.number("attention.clamp_kqv")} if "attention.clamp_kqv" in metadata else {}
    return {**_all_attend(metadata), **clamp}


MINISTRAL3 = GgufArchitecture("Ministral3ForCausalLM", _ministral3, rotates_pairs=True, model_type="ministral3")

OF_TRANSFORMERS = {
    "arcee": GgufArchitecture("ArceeForCausalLM", _all_attend, rotates_pairs=True, model_type="arcee"),
    "command-r": GgufArchitecture("CohereForCausalLM", partial(_cohere, read_layers=_all_attend), model_type="cohere"),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", partial(_cohere, read_layers=_windows), model_type="cohere2"),
    "dots1": GgufArchitecture("Dots1ForCausalLM", _dots1, _DOTS1_NAMES, model_type="dots1"),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM", _minimax_m2, _MINIMAX_NAMES, rotates_parts=True, model_type="minimax_m2"
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", _all_attend, model_type="ernie4_5"),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_MoeForCausalLM", _ernie4_5_moe, _ERNIE4_5_MOE_NAMES, model_type="ernie4_5_moe"
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM", _glm4moe, _GLM4MOE_NAMES, rotates_parts=True, model_type="glm4_moe"
    ),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", _windows, _EXAONE4_NAMES, model_type="exaone4"),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1ForCausalLM", _all_attend, _HUNYUAN_NAMES, model_type="hunyuan_v1_dense"
    ),
    "lfm2": GgufArchitecture(
        "Lfm2ForCausalLM",
        _lfm2,
        _LFM2_NAMES,
        model_names=_LFM2_MODEL,
        model_type="lfm2",
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        _lfm2moe,
        _LFM2_NAMES | _LFM2_EXPERTS,
        model_names=_LFM2_MODEL,
        model_type="lfm2_moe",
    ),
    "nemotron": GgufArchitecture(
        "NemotronForCausalLM",
        partial(_layer_norms, field="norm_eps"),
        norm_offset=1.0,
        rotates_parts=True,
        model_type="nemotron",
    ),
    "olmo": GgufArchitecture("OlmoForCausalLM", _olmo, rotates_pairs=True, model_type="olmo"),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", _olmoe, EXPERTS, model_type="olmoe"),
    "phi2": GgufArchitecture(
        "PhiForCausalLM",
        partial(_layer_norms, field="layer_norm_eps"),
        _PHI2_NAMES,
        rotates_parts=True,
        model_names=_PHI2_MODEL,
        model_type="phi",
    ),
    "seed_oss": GgufArchitecture(
        "SeedOssForCausalLM", _all_attend, {"post_attention_norm": "post_attention_layernorm"}, model_type="seed_oss"
    ),
    "stablelm": GgufArchitecture(
        "StableLmForCausalLM",
        partial(_layer_norms, field="layer_norm_eps"),
        _STABLELM_NAMES,
        rotates_parts=True,
        model_type="stablelm",
    ),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM",
        _starcoder2,
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        model_type="starcoder2",
    ),
}
"""By general.architecture."""
