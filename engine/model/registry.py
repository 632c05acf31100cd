"""Which architecture of a checkpoint means which traits of the decoder."""

from collections.abc import Callable

from engine.model.config import Architecture, ModelConfig
from engine.model.decoder_layer import DecoderTraits
from engine.model.llama import llama_traits
from engine.model.mistral import mistral_traits
from engine.model.qwen2 import qwen2_traits
from engine.model.qwen3 import qwen3_traits

_TRAITS: dict[Architecture, Callable[[ModelConfig], DecoderTraits]] = {
    Architecture.LLAMA: llama_traits,
    Architecture.MISTRAL: mistral_traits,
    Architecture.QWEN2: qwen2_traits,
    Architecture.QWEN3: qwen3_traits,
}


def decoder_traits(config: ModelConfig) -> DecoderTraits:
    """In what the model differs from the skeleton."""
    return _TRAITS[config.architecture](config)
