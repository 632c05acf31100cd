"""Falcon-H1 and Nemotron-H in GGUF: `falcon-h1`, `nemotron_h` and `nemotron_h_moe`, with layers that keep a state."""

from engine.model.gguf_architecture import Fields, GgufArchitecture
from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_states import MAMBA, mamba

_FALCON_NAMES = {
    **{f"ssm_{name}": f"mamba.{module}" for name, module in MAMBA.items()},
    "ffn_norm": "pre_ff_layernorm.weight",  # whose name in files has no end
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON_NAMES = {
    **{f"ssm_{name}": f"mixer.{module}" for name, module in MAMBA.items()},
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_MODEL = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}


def _falcon_h1(metadata: GgufMetadata) -> Fields:
    """Multipliers of the configuration are in the weights already."""
    sizes = mamba(metadata)
    return {
        "mamba_d_ssm": sizes.inner,
        "mamba_n_heads": sizes.num_heads,
        "mamba_d_head": sizes.inner // sizes.num_heads,
        "mamba_n_groups": sizes.num_groups,
        "mamba_d_state": sizes.state_size,
        "mamba_d_conv": sizes.width,
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(metadata: GgufMetadata) -> Fields:
    sizes = mamba(metadata)
    feed_forward = metadata.integers_by_layer("feed_forward_length")
    of_tokens = "moe" if metadata.num_experts else "mlp"
    types = [
        "full_attention" if heads else of_tokens if size else "linear_attention"
        for heads, size in zip(metadata.kv_heads_by_layer(), feed_forward, strict=True)
    ]
    fields = {
        "layers_block_type": types,
        "layer_norm_epsilon": metadata.norm_epsilon,
        "mamba_num_heads": sizes.num_heads,
        "mamba_head_dim": sizes.inner // sizes.num_heads,
        "n_groups": sizes.num_groups,
        "ssm_state_size": sizes.state_size,
        "conv_kernel": sizes.width,
    }
    if not metadata.num_experts:
        return fields
    return {
        **fields,
        "n_routed_experts": metadata.num_experts,
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.integer("moe_latent_size", 0, minimum=0) or None,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


FALCON_H1 = GgufArchitecture(
    "FalconH1ForCausalLM",
    _falcon_h1,
    _FALCON_NAMES,
    model_names={"output_norm.weight": "model.final_layernorm.weight"},
    model_type="falcon_h1",
)
NEMOTRON_H = GgufArchitecture(
    "NemotronHForCausalLM", _nemotron_h, _NEMOTRON_NAMES, model_names=_NEMOTRON_MODEL, model_type="nemotron_h"
)
