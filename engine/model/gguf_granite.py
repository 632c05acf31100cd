"""Granite in GGUF: `granite`, `granitemoe` and `granitehybrid`, whose layers keep a state or attend.

llama.cpp has gate and up in two tensors, transformers in one linear layer, which is packed from both.
"""

from engine.model.gguf_architecture import Fields, GgufArchitecture
from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_states import MAMBA, mamba

_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
    "ffn_gate_shexp": "shared_mlp.input_linear.gate_proj",
    "ffn_up_shexp": "shared_mlp.input_linear.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_HYBRID_NAMES = {
    **_EXPERTS,
    **{f"ssm_{name}": f"mamba.{module}" for name, module in MAMBA.items()},
    "ffn_gate": "shared_mlp.input_linear.gate_proj",
    "ffn_up": "shared_mlp.input_linear.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
_SHARED = "expert_shared_feed_forward_length"


def _multipliers(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("attention.sliding_window", 0)
    return {
        "attention_multiplier": metadata.number("attention.scale", metadata.head_dim**-0.5),
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale"),
    }


def granite(metadata: GgufMetadata) -> Fields:
    """Fields of a dense model whose layers attend."""
    metadata.refuse_others("rope.scaling.finetuned", True)  # otherwise no layer rotates
    metadata.refuse_others("expert_count", 0)
    return _multipliers(metadata)


def _granitemoe(metadata: GgufMetadata) -> Fields:
    metadata.refuse_others("rope.scaling.finetuned", True)
    return {
        **_multipliers(metadata),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "shared_intermediate_size": metadata.integer(_SHARED, 0, minimum=0),
    }


def _granitehybrid(metadata: GgufMetadata) -> Fields:
    has_experts = metadata.num_experts > 0
    states = mamba(metadata)
    hidden, heads = metadata.integer("embedding_length"), states.num_heads
    if states.inner % hidden:
        raise metadata.error("ssm.inner_size", f"is {states.inner}, expected a multiple of embedding_length, {hidden}")
    return {
        **_multipliers(metadata),
        "layer_types": ["full_attention" if count else "linear_attention" for count in metadata.kv_heads_by_layer()],
        "num_local_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.integer("expert_used_count") if has_experts else 0,
        "shared_intermediate_size": metadata.integer(_SHARED) if has_experts else metadata.intermediate_size,
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else None,
        "mamba_expand": states.inner // hidden,
        "mamba_n_heads": heads,
        "mamba_d_head": states.inner // heads,
        "mamba_n_groups": states.num_groups,
        "mamba_d_state": states.state_size,
        "mamba_d_conv": states.width,
    }


def granitemoe(metadata: GgufMetadata) -> GgufArchitecture:
    """Returns the architecture with an expert that all tokens share, or the one without."""
    return _MOE_SHARED if metadata.raw(_SHARED, 0) else _MOE


_MOE = GgufArchitecture("GraniteMoeForCausalLM", _granitemoe, _EXPERTS, rotates_pairs=True, model_type="granitemoe")
_MOE_SHARED = GgufArchitecture(
    "GraniteMoeSharedForCausalLM", _granitemoe, _EXPERTS, rotates_pairs=True, model_type="granitemoeshared"
)
HYBRID = GgufArchitecture(
    "GraniteMoeHybridForCausalLM",
    _granitehybrid,
    _HYBRID_NAMES,
    rotates_pairs=True,
    model_type="granitemoehybrid",
)
