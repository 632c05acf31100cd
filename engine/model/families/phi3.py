"""Phi-3 and Phi-4, also -mini (arXiv:2404.14219, arXiv:2503.01743): fused projections, partial rotation, longrope."""

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, sliding_window
from engine.model.rope import RopeConfig, rope_section


def _traits(fields: ConfigFields) -> DecoderTraits:
    section = rope_section(fields)
    if section.raw("rope_type", section.raw("type", "default")) in ("su", "yarn"):  # older names of longrope
        section = section.replaced({"rope_type": "longrope"})
    return DecoderTraits(
        sliding_windows=(sliding_window(fields),) * num_layers(fields),
        ropes=(RopeConfig.from_section(section, fields),) * num_layers(fields),
        fused_qkv=True,
        fused_gate_up=True,
    )


PHI3 = Family(
    "Phi3ForCausalLM",
    _traits,
    {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "eos_token_id": 32000,
    },
)
