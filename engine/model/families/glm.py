"""GLM and GLM-4 (arXiv:2406.12793): neighbouring dimensions rotated as pairs, half of each head; GLM-4 adds norms."""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, PostNormNames, num_layers
from engine.model.rope import RopeConfig


def _glm(fields: ConfigFields) -> DecoderTraits:
    rope = replace(RopeConfig.from_fields(fields), is_interleaved=True)
    return DecoderTraits(
        sliding_windows=(None,) * num_layers(fields),
        ropes=(rope,) * num_layers(fields),
        qkv_bias=fields.flag("attention_bias", True),
        fused_gate_up=True,
    )


def _glm4(fields: ConfigFields) -> DecoderTraits:
    names = PostNormNames("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(_glm(fields), post_norms=True, post_norm_names=names)


_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
}
_END_TOKENS = {"eos_token_id": [151329, 151336, 151338]}

GLM = Family("GlmForCausalLM", _glm, _DEFAULTS, _END_TOKENS)
GLM4 = Family("Glm4ForCausalLM", _glm4, _DEFAULTS, _END_TOKENS)
