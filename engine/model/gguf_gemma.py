"""Gemma 3n and 4 in GGUF (`gemma3n`, `gemma4`), whose layers with windows and others differ in more than these."""

import math
from typing import Any

from engine.model.gguf_architecture import POST_NORMS, Fields, GgufArchitecture
from engine.model.gguf_metadata import GgufMetadata

_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N_NAMES = {
    **POST_NORMS,
    **_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_NAMES = {
    **POST_NORMS,
    **_PER_LAYER,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}
_MODEL_NAMES = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_NUM_STREAMS = 4
"""Hidden states of a token that Gemma 3n keeps beside each other."""
_GEMMA3N_MODEL = {
    **_MODEL_NAMES,
    **{
        f"altup_{stored}.{stream}.weight": f"model.altup_{name}.{stream}.weight"
        for stored, name in (("proj", "projections"), ("unembd_proj", "unembed_projections"))
        for stream in range(_NUM_STREAMS - 1)
    },
}


def _per_layer(metadata: GgufMetadata, rotation: str) -> Fields:
    """Fields of both, and the kind of rotation in layers without a window."""
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0, minimum=0),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0, minimum=0),
        "rope_parameters": {
            "full_attention": {"rope_type": rotation, "rope_theta": metadata.number("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 1e4)},
        },
    }


def _gemma3n(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("altup.num_inputs", _NUM_STREAMS)
    name = "feed_forward_length"
    scales = metadata.numbers_by_layer("activation_sparsity_scale")
    return {
        **_per_layer(metadata, "default"),
        "layer_types": metadata.layer_types(5),
        "intermediate_size": metadata.integers_by_layer(name) if metadata.is_list(name) else metadata.integer(name),
        "altup_active_idx": metadata.integer("altup.active_idx", 0, minimum=0),
        # scales are quantiles of a normal distribution, of which config.json has the parts below
        "activation_sparsity_pattern": [round(0.5 + 0.5 * math.erf(scale / math.sqrt(2)), 6) for scale in scales],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma4(metadata: GgufMetadata) -> Fields:
    types = metadata.layer_types(6)
    fields: dict[str, Any] = {
        **_heads(metadata, types),
        **_feed_forward(metadata),
        **_per_layer(metadata, "proportional"),
        "layer_types": types,
    }
    if "final_logit_softcapping" in metadata:
        fields["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    return fields


def _heads(metadata: GgufMetadata, types: list[str]) -> Fields:
    """Returns sizes of heads; if layers without a window have fewer of them, these have no values besides keys."""
    size = metadata.integer("attention.key_length_swa")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.refuse_others(name, size)
    fields: dict[str, Any] = {"head_dim": size, "global_head_dim": metadata.head_dim}
    name = "attention.head_count_kv"
    if not metadata.is_list(name):
        return {**fields, "num_key_value_heads": metadata.num_kv_heads}
    counts = metadata.kv_heads_by_layer()
    of_type = {kind: {count for count, other in zip(counts, types, strict=True) if other == kind} for kind in {*types}}
    if 0 in counts or any(len(found) != 1 for found in of_type.values()):
        raise metadata.error(name, f"is {counts[:9]}, supported in GGUF is one number for each of {sorted(of_type)}")
    return {
        **fields,
        "num_key_value_heads": of_type.get("sliding_attention", {1}).pop(),
        "num_global_key_value_heads": of_type.get("full_attention", {1}).pop(),
        "attention_k_eq_v": True,
    }


def _feed_forward(metadata: GgufMetadata) -> Fields:
    """Returns sizes of feed-forward networks; those of layers with the keys of others may be twice as wide."""
    fields: dict[str, Any] = {"enable_moe_block": metadata.num_experts > 0}
    if metadata.num_experts:
        fields |= {
            "num_experts": metadata.num_experts,
            "top_k_experts": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        }
    name = "feed_forward_length"
    if metadata.is_list(name):
        sizes = metadata.integers_by_layer(name)
        num_own = metadata.num_layers - metadata.integer("attention.shared_kv_layers", 0, minimum=0)
        if sizes != [sizes[0]] * num_own + [2 * sizes[0]] * (len(sizes) - num_own):
            raise metadata.error(
                name, f"is {sizes[:9]}, expected {sizes[0]} in {num_own} layers and twice as much then"
            )
        fields["use_double_wide_mlp"] = True
    return fields


GEMMA3N = GgufArchitecture(
    "Gemma3nForCausalLM", _gemma3n, _GEMMA3N_NAMES, model_names=_GEMMA3N_MODEL, model_type="gemma3n_text"
)
GEMMA4 = GgufArchitecture("Gemma4ForCausalLM", _gemma4, _NAMES, model_names=_MODEL_NAMES, model_type="gemma4_text")
