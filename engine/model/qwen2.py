"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115)."""

from engine.model.config import ModelConfig
from engine.model.decoder_layer import DecoderTraits


def qwen2_traits(config: ModelConfig) -> DecoderTraits:
    """Biases on queries, keys and values."""
    return DecoderTraits(sliding_windows=qwen_sliding_windows(config), qkv_bias=True)


def qwen_sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer: none unless `use_sliding_window`, whatever size is given.

    Which layers have it is in `layer_types`; older checkpoints have it from `max_window_layers` on.
    """
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    return tuple(window if layer >= config.max_window_layers else None for layer in range(config.num_layers))
