"""LoRA adapters of an engine: opens those that --lora names, plans the memory of others, and loads them at run time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import AdapterNotFound, CheckpointError, ConfigError, InvalidRequest
from engine.model.config import ModelConfig
from engine.model.confined_file import find_confined, open_confined
from engine.model.linear_adapters import AdaptableModel
from engine.model.loader import projection_shapes
from engine.model.lora import LoraAdapter, adapter_bytes
from engine.startup.served_model import ServedModel
from kernels.interface import AdapterOps

DEFAULT_MAX_LORAS = 4


def open_adapters(config: EngineConfig, model: ServedModel) -> tuple[LoraAdapter, ...]:
    """Returns the checked adapters, in the order of the flags.

    Raises:
        ConfigError: two models have the same name, or adapters are not supported with another setting.
        CheckpointError: an adapter cannot be read or does not fit the model.
    """
    _check_reservation(config)
    if not config.lora and not config.enable_lora:
        return ()
    flag = "--enable-lora" if config.enable_lora else "--lora"
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"{flag} is not supported with --tensor-parallel-size {config.tensor_parallel_size}: use 1")
    layers = _layers_of(model)
    if not layers:
        assert not isinstance(model, ModelConfig), "all have attention layers"
        raise ConfigError(
            f"{flag} is not supported for {model.name}, which transformers computes: it has no linear layers that "
            "adapters can change; merge the adapter into it"
        )
    max_rank = config.max_lora_rank if config.enable_lora else None
    adapters: list[LoraAdapter] = []
    for setting in config.lora:
        name, _, path = setting.partition("=")
        if name in (*config.model_names, *(adapter.name for adapter in adapters)):
            raise ConfigError(f"--lora {setting}: {name!r} is the name of another model: choose a different one")
        try:
            adapters.append(LoraAdapter.open(name, Path(path).expanduser(), layers, max_rank=max_rank))
        except CheckpointError as error:
            raise CheckpointError(f"--lora {name}: {error}") from error
    return tuple(adapters)


def _check_reservation(config: EngineConfig) -> None:
    """Checks the flags of adapters that are loaded at run time."""
    if not config.enable_lora:
        if config.lora_dir:
            raise ConfigError("--lora-dir needs --enable-lora, which reserves memory for its adapters")
        return
    if (num_slots := num_adapter_slots(config)) < len(config.lora):
        raise ConfigError(f"--max-loras is {num_slots}, but --lora names {len(config.lora)} adapters: raise it")
    for folder in config.lora_dir:
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(f"--lora-dir is {folder}, it must be a folder that this user can read")


def num_adapter_slots(config: EngineConfig) -> int:
    """Returns how many adapters can be loaded at a time."""
    if not config.enable_lora:
        return len(config.lora)
    return config.max_loras or max(DEFAULT_MAX_LORAS, len(config.lora) + 1)


def adapters_bytes(config: EngineConfig, model: ServedModel, adapters: Sequence[LoraAdapter]) -> int:
    """Returns the most memory of the adapters: of those that are loaded, or of all that may be."""
    if config.enable_lora:
        return num_adapter_slots(config) * adapter_bytes(config.max_lora_rank, _layers_of(model).values())
    if not adapters:
        return 0
    layers, changed = _layers_of(model), {module for adapter in adapters for module in adapter.modules}
    rank = max(adapter.rank for adapter in adapters)  # each has room for the largest one
    return len(adapters) * adapter_bytes(rank, [layers[module] for module in changed])


def _layers_of(model: ServedModel) -> Mapping[str, tuple[int, int]]:
    """Returns rows and columns of the linear layers that adapters can change."""
    return projection_shapes(model) if isinstance(model, ModelConfig) else model.projection_shapes()


@dataclass(frozen=True, slots=True)
class ModelAdapters:
    """Writes adapters of a model to the slots that were reserved for them; implements `AdapterLoader`.

    Attributes:
        layers: rows and columns of its linear layers.
        max_rank: largest rank.
        folders: those of --lora-dir.
    """

    model: AdaptableModel
    ops: AdapterOps
    layers: Mapping[str, tuple[int, int]]
    max_rank: int
    folders: Sequence[Path]

    @classmethod
    def reserve(cls, config: EngineConfig, model: AdaptableModel, ops: AdapterOps) -> "ModelAdapters":
        """Allocates the memory of all adapters."""
        model.reserve_adapters(ops, num_adapter_slots(config), config.max_lora_rank)
        folders = [Path(folder).expanduser() for folder in config.lora_dir]
        return cls(model, ops, model.projection_shapes(), config.max_lora_rank, folders)

    def write(self, index: int, adapter: LoraAdapter) -> None:
        """Reads an adapter to its slot, which no step uses.

        Raises: CheckpointError: see `LoraAdapter.reading`; the slot may be written again.
        """
        with adapter.reading() as change_of:
            self.model.set_adapter(self.ops, index, change_of)

    def __call__(self, index: int, name: str, path: str, sha256: bytes) -> bytes:
        """See `AdapterLoader`."""
        try:
            folder = find_confined(path, self.folders)
            open_file = partial(open_confined, roots=self.folders)
            adapter = LoraAdapter.open(name, folder, self.layers, max_rank=self.max_rank, open_file=open_file)
            if sha256 and adapter.sha256 != sha256:
                raise InvalidRequest(
                    f"{path}: the digest of its files is {adapter.sha256.hex()[:12]}, not {sha256.hex()[:12]}"
                )
            self.write(index, adapter)
        except FileNotFoundError:
            raise AdapterNotFound(f"lora_path {path[:200]!r}: no such folder in those of --lora-dir") from None
        return adapter.sha256
