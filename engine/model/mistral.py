"""Mistral (arXiv:2310.06825)."""

from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderTraits


def mistral_traits(config: ModelConfig) -> DecoderTraits:
    """A sliding window in every layer, where the checkpoint has one (7B v0.1 does, later ones do not)."""
    return DecoderTraits(sliding_windows=(config.sliding_window,) * config.num_layers)
