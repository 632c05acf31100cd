"""Llama (arXiv:2302.13971; Llama 3: arXiv:2407.21783, whose rope scaling is in `rope.py`)."""

from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderTraits


def llama_traits(config: ModelConfig) -> DecoderTraits:
    """The skeleton as it is; biases where the checkpoint asks for them."""
    return DecoderTraits(
        sliding_windows=(None,) * config.num_layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
