"""Gemma 3, text (arXiv:2503.19786): norms around attention and feed-forward network, stored minus one."""

import math

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, sliding_window, windows_by_layer_type
from engine.model.rope import RopeConfig


def _gemma3(fields: ConfigFields) -> DecoderTraits:
    """Layers with a window have a rotation of their own; by default every sixth has no window."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name in fields:
            raise fields.error(name, f"is {fields.raw(name)!r}, Gemma 3 is supported without a soft cap")
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error(
            "use_bidirectional_attention", "is true: tokens attend to later ones, so none can be generated"
        )
    pattern = fields.integer("sliding_window_pattern", 6)
    every_sixth = tuple(1 if (layer + 1) % pattern else None for layer in range(num_layers(fields)))
    is_local = tuple(map(bool, windows_by_layer_type(fields, 1, every_sixth)))
    window = sliding_window(fields)
    local_rotation, rotation = _ropes(fields)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=tuple(window if local else None for local in is_local),
        ropes=tuple(local_rotation if local else rotation for local in is_local),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def _ropes(fields: ConfigFields) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotations of layers with a window, and of layers without; older files have fields of other names."""
    sections = fields.section("rope_parameters")
    local = sections.section("sliding_attention")
    whole = fields.section("rope_scaling") if "rope_scaling" in fields else sections.section("full_attention")
    return (
        RopeConfig.from_section(
            local.with_defaults({"rope_theta": fields.number("rope_local_base_freq", 1e4)}), fields
        ),
        RopeConfig.from_section(whole.with_defaults({"rope_theta": fields.number("rope_theta", 1e6)}), fields),
    )


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    _gemma3,
    {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation_field="hidden_activation",
)
