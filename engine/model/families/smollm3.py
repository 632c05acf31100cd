"""SmolLM3: as Llama, but some layers do not rotate queries and keys (arXiv:2501.18795)."""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.families.llama import llama_traits
from engine.model.family import DecoderTraits, Family, num_layers, sliding_window, windows_by_layer_type
from engine.model.rope import RopeConfig


def _traits(fields: ConfigFields) -> DecoderTraits:
    rope, rotates = RopeConfig.from_fields(fields), _rotates(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    return replace(
        llama_traits(fields),
        sliding_windows=windows_by_layer_type(
            fields, window, tuple(None if rotated else window for rotated in rotates)
        ),
        ropes=tuple(rope if rotated else None for rotated in rotates),
    )


def _rotates(fields: ConfigFields) -> tuple[bool, ...]:
    """Whether each layer rotates: 1 in `no_rope_layers`; by default not in every fourth."""
    count = num_layers(fields)
    if "no_rope_layers" not in fields:
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    flags = fields.raw("no_rope_layers")
    if not isinstance(flags, list) or len(flags) < count or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"is {flags!r}, expected a list of 0 or 1 for each of {count} layers")
    return tuple(map(bool, flags[:count]))


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    _traits,
    {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    },
)
