"""Mistral (arXiv:2310.06825): a sliding window in every layer if the checkpoint has one (7B v0.1 only)."""

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes, sliding_window


def _traits(fields: ConfigFields) -> DecoderTraits:
    return DecoderTraits(
        sliding_windows=(sliding_window(fields),) * num_layers(fields),
        ropes=same_ropes(fields),
    )


MISTRAL = Family("MistralForCausalLM", _traits, {"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2})
