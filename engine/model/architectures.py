"""Architectures: how each one differs from the common decoder.

To add one, write a function that returns its `DecoderTraits` and register it in `_TRAITS`.
"""

from collections.abc import Callable

from engine.model.config import Architecture, ModelConfig
from engine.model.decoder_layer import DecoderTraits


def decoder_traits(config: ModelConfig) -> DecoderTraits:
    """Returns the traits of the architecture that a checkpoint names."""
    return _TRAITS[config.architecture](config)


def _llama(config: ModelConfig) -> DecoderTraits:
    """Llama (arXiv:2302.13971; Llama 3: arXiv:2407.21783, whose rope scaling is in `rope.py`)."""
    return DecoderTraits(
        sliding_windows=(None,) * config.num_layers,
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def _mistral(config: ModelConfig) -> DecoderTraits:
    """Mistral (arXiv:2310.06825): a sliding window in every layer if the checkpoint has one (7B v0.1 only)."""
    return DecoderTraits(sliding_windows=(config.sliding_window,) * config.num_layers)


def _qwen2(config: ModelConfig) -> DecoderTraits:
    """Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): biases on queries, keys and values."""
    return DecoderTraits(sliding_windows=_qwen_sliding_windows(config), qkv_bias=True)


def _qwen3(config: ModelConfig) -> DecoderTraits:
    """Qwen3, dense (arXiv:2505.09388): normalizes query and key heads; biases only if the checkpoint has them."""
    return DecoderTraits(
        sliding_windows=_qwen_sliding_windows(config),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        qk_norm=True,
    )


def _qwen_sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer; none unless `use_sliding_window`, even if a size is given.

    `layer_types` lists the layers that have one; older checkpoints have it from layer `max_window_layers` on.
    """
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    return tuple(window if layer >= config.max_window_layers else None for layer in range(config.num_layers))


_TRAITS: dict[Architecture, Callable[[ModelConfig], DecoderTraits]] = {
    Architecture.LLAMA: _llama,
    Architecture.MISTRAL: _mistral,
    Architecture.QWEN2: _qwen2,
    Architecture.QWEN3: _qwen3,
}
