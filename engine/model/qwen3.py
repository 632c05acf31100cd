"""Qwen3, dense (arXiv:2505.09388)."""

from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderTraits
from engine.model.qwen2 import qwen_sliding_windows


def qwen3_traits(config: ModelConfig) -> DecoderTraits:
    """Query and key heads are normed; the biases of Qwen2 are gone, save where the checkpoint asks for them."""
    return DecoderTraits(
        sliding_windows=qwen_sliding_windows(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=True,
    )
