"""Mistral (arXiv:2310.06825): a sliding window in every layer if the checkpoint has one (7B v0.1 only)."""

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes, sliding_window


def mistral_traits(fields: ConfigFields) -> DecoderTraits:
    """A sliding window, and nothing else."""
    return DecoderTraits(
        sliding_windows=(sliding_window(fields),) * num_layers(fields),
        ropes=same_ropes(fields),
    )


MISTRAL = Family(
    "MistralForCausalLM", mistral_traits, {"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2}
)
