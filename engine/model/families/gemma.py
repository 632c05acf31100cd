"""Gemma (arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and the text part of Gemma 3 (arXiv:2503.19786).

Norms are stored minus one; those of Gemma 2 and 3 are around attention and feed-forward network. Gemma 2 caps scores
and logits.
"""

import math
from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes, sliding_window, windows_by_layer_type
from engine.model.rope import RopeConfig


def _gemma(fields: ConfigFields) -> DecoderTraits:
    _refuse_bidirectional(fields)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=(None,) * num_layers(fields),
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        norm_offset=1.0,
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def _gemma2(fields: ConfigFields) -> DecoderTraits:
    """By default every second layer has no window."""
    is_local = _local_layers(fields, 2)
    return _traits(fields, is_local, same_ropes(fields))


def _gemma3(fields: ConfigFields) -> DecoderTraits:
    """Layers with a window have a rotation of their own; by default every sixth has no window."""
    if "attn_logit_softcapping" in fields:
        cap = fields.raw("attn_logit_softcapping")
        raise fields.error("attn_logit_softcapping", f"is {cap!r}, Gemma 3 is supported without a cap of scores")
    is_local = _local_layers(fields, fields.integer("sliding_window_pattern", 6))
    local_rotation, rotation = _ropes(fields)
    ropes = tuple(local_rotation if local else rotation for local in is_local)
    return replace(_traits(fields, is_local, ropes), qk_norm=True)


def _local_layers(fields: ConfigFields, pattern: int) -> tuple[bool, ...]:
    """Returns which layers have a window, without `layer_types` all but those whose number `pattern` divides."""
    default = tuple(1 if (layer + 1) % pattern else None for layer in range(num_layers(fields)))
    return tuple(map(bool, windows_by_layer_type(fields, 1, default)))


def _refuse_bidirectional(fields: ConfigFields) -> None:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error(
            "use_bidirectional_attention", "is true: tokens attend to later ones, so none can be generated"
        )


def _traits(fields: ConfigFields, is_local: tuple[bool, ...], ropes: tuple[RopeConfig, ...]) -> DecoderTraits:
    _refuse_bidirectional(fields)
    window = sliding_window(fields)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=tuple(window if local else None for local in is_local),
        ropes=ropes,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        post_norms=True,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping"),
        logit_soft_cap=_soft_cap(fields, "final_logit_softcapping"),
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
    )


def _soft_cap(fields: ConfigFields, name: str) -> float | None:
    return fields.number(name) if name in fields else None


def _ropes(fields: ConfigFields) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotations of layers with a window, and of layers without; older files have fields of other names."""
    sections = fields.section("rope_parameters")
    local = sections.section("sliding_attention")
    whole = sections.section("full_attention").replaced(fields.section("rope_scaling").values)
    return (
        RopeConfig.from_section(
            local.with_defaults({"rope_theta": fields.number("rope_local_base_freq", 1e4)}), fields
        ),
        RopeConfig.from_section(whole.with_defaults({"rope_theta": fields.number("rope_theta", 1e6)}), fields),
    )


GEMMA = Family(
    "GemmaForCausalLM",
    _gemma,
    {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation_names={"gelu": "gelu_pytorch_tanh"},  # of the first files, which mean it
)
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    _gemma2,
    {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation_field="hidden_activation",
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
