"""DeepSeek's models in GGUF, and others of their form: attention over latents, and experts in groups.

llama.cpp's `deepseek2` is DeepSeek-V2 and V3, and GLM-4.7 Flash, Kimi K2 and Youtu-LLM, which compute what V3 does.
"""

from typing import Any

from engine.model.gguf_architecture import EXPERTS, SHARED_EXPERTS, Fields, GgufArchitecture
from engine.model.gguf_metadata import GgufMetadata

_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""

_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **EXPERTS,
    **SHARED_EXPERTS,
}


def latent_heads(metadata: GgufMetadata) -> Fields:
    """Returns the sizes of heads over latents.

    Files in which keys and values are expanded by two tensors give those of latents as the sizes of keys and values,
    and those of heads under other names.
    """
    rotated = metadata.integer("rope.dimension_count")
    key, value = "key_length", "value_length"
    if "attention.key_length_mla" in metadata:
        key, value = "key_length_mla", "value_length_mla"
    if (key_size := metadata.integer(f"attention.{key}")) <= rotated:
        raise metadata.error(f"attention.{key}", f"is {key_size}, expected more than the {rotated} that are rotated")
    return {
        "num_key_value_heads": metadata.num_heads,
        "q_lora_rank": metadata.integer("attention.q_lora_rank", 0, minimum=0) or None,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_size - rotated,
        "v_head_dim": metadata.integer(f"attention.{value}"),
    }


def _deepseek(metadata: GgufMetadata) -> Fields:
    for name in ("attention.sliding_window", "attention.temperature_scale"):
        metadata.refuse_others(name, 0)
    num_layers = metadata.num_layers
    scaling = metadata.rope_scaling()
    if scaling is not None and "mscale_all_dim" in scaling:  # a tenth of it is in the file; both are equal
        factor = round(10 * scaling["mscale_all_dim"], 6)
        scaling |= {"mscale": factor, "mscale_all_dim": factor}
    fields: dict[str, Any] = {**latent_heads(metadata), "rope_scaling": scaling}
    if not metadata.num_experts:
        return {**fields, "first_k_dense_replace": num_layers}
    return {
        **fields,
        "n_routed_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0, minimum=0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _deepseek_v2(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("expert_weights_norm", False)
    fields = _deepseek(metadata)
    return {**fields, "topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def _deepseek_v3(metadata: GgufMetadata) -> Fields:
    return {**_deepseek(metadata), "rope_interleave": True}


_V2 = GgufArchitecture("DeepseekV2ForCausalLM", _deepseek_v2, _NAMES, model_type="deepseek_v2")
_V3 = GgufArchitecture("DeepseekV3ForCausalLM", _deepseek_v3, _NAMES, model_type="deepseek_v3")
_GLM_FLASH_VOCAB = 154880
"""Number of tokens of GLM-4.7 Flash, whose first files do not say how experts are chosen."""


def deepseek2(metadata: GgufMetadata) -> GgufArchitecture:
    """Returns DeepSeek-V2, whose experts are chosen by a softmax, or V3, by sigmoids."""
    is_flash = metadata.raw("vocab_size", None) == _GLM_FLASH_VOCAB
    gating = metadata.integer("expert_gating_func", 0, minimum=0) or (_SIGMOID if is_flash else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise metadata.error("expert_gating_func", f"is {gating}, supported in GGUF are {_SOFTMAX} and {_SIGMOID}")
    return _V2 if gating == _SOFTMAX and metadata.num_experts else _V3
