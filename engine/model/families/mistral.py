"""Mistral (arXiv:2310.06825): a window in every layer (7B v0.1), or in those of `layer_types` (Ministral 8B)."""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.family import (
    DecoderTraits,
    Family,
    num_layers,
    same_ropes,
    sliding_window,
    windows_by_layer_type,
)


def mistral_traits(fields: ConfigFields) -> DecoderTraits:
    """A sliding window, and nothing else."""
    return DecoderTraits(
        sliding_windows=(sliding_window(fields),) * num_layers(fields),
        ropes=same_ropes(fields),
    )


def _traits(fields: ConfigFields) -> DecoderTraits:
    """`transformers` reads a file with `layer_types` as one of Ministral."""
    common = mistral_traits(fields)
    return replace(
        common, sliding_windows=windows_by_layer_type(fields, sliding_window(fields), common.sliding_windows)
    )


MISTRAL = Family(
    "MistralForCausalLM",
    _traits,
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)
