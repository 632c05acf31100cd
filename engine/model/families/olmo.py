"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms behind attention and feed-forward network, none before them.

Norms of queries and of keys are of all heads of a token together.
"""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes, sliding_window, windows_by_layer_type
from engine.model.rope import RopeConfig


def _olmo2(fields: ConfigFields) -> DecoderTraits:
    number = num_layers(fields)
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=(None,) * number,
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        projection_norms=True,
        pre_norms=False,
        post_norms=True,
    )


def _olmo3(fields: ConfigFields) -> DecoderTraits:
    """By default every fourth layer has no window; a scaling of the rotation is for layers without one only."""
    window = sliding_window(fields)
    default = tuple(window if (layer + 1) % 4 else None for layer in range(num_layers(fields)))
    windows = windows_by_layer_type(fields, window, default)
    sections = fields.section("rope_parameters")
    whole = sections.section("full_attention").replaced(fields.section("rope_scaling").values)
    local_rope, rope = (
        RopeConfig.from_section(section, fields) for section in (sections.section("sliding_attention"), whole)
    )
    ropes = tuple(rope if window is None else local_rope for window in windows)
    return replace(_olmo2(fields), sliding_windows=windows, ropes=ropes)


_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}

OLMO2 = Family("Olmo2ForCausalLM", _olmo2, _DEFAULTS)
OLMO3 = Family("Olmo3ForCausalLM", _olmo3, {**_DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0})
