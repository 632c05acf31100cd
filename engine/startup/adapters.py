"""Opens the LoRA adapters that --lora names, and checks that what computes the model supports them."""

from pathlib import Path

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import projection_shapes
from engine.model.lora import LoraAdapter
from engine.startup.served_model import ServedModel


def open_adapters(config: EngineConfig, model: ServedModel) -> tuple[LoraAdapter, ...]:
    """Returns the checked adapters, in the order of the flags.

    Raises:
        ConfigError: two models have the same name, or adapters are not supported with another setting.
        CheckpointError: an adapter cannot be read or does not fit the model.
    """
    if not config.lora:
        return ()
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"--lora is not supported with --tensor-parallel-size {config.tensor_parallel_size}: use 1")
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            f"--lora is not supported for {model.name}, which is computed by transformers: merge the adapter into it"
        )
    layers = projection_shapes(model)
    adapters: list[LoraAdapter] = []
    for setting in config.lora:
        name, _, path = setting.partition("=")
        if name in (config.model_name, *(adapter.name for adapter in adapters)):
            raise ConfigError(f"--lora {setting}: {name!r} is the name of another model: choose a different one")
        try:
            adapters.append(LoraAdapter.open(name, Path(path).expanduser(), layers))
        except CheckpointError as error:
            raise CheckpointError(f"--lora {name}: {error}") from error
    return tuple(adapters)
