"""The model of a checkpoint, computed by Chairlift's own decoder or by transformers: opens, sizes and loads either.

transformers is imported when a model needs it.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.hub import resolve_model
from engine.model.layer_groups import group_layers
from engine.model.linear import Kept
from engine.model.loader import check_checkpoint, cpu_checkpoint_dtype, load_model, resolve_dtype, weights_bytes
from engine.model.model_folder import check_folder
from engine.model.model_shape import ModelShape
from engine.model.shapes import find_shape
from engine.model.sharding import Sharding
from engine.model.weights import Progress, check_headers
from engine.parallel.group import ParallelGroup
from engine.runner.step_model import StepModel
from engine.startup.gpu import takes_latents
from engine.startup.packed_weights import packed_cache
from engine.startup.progress import StartupProgress
from kernels.interface import KernelOps

if TYPE_CHECKING:
    from engine.model.transformers_probe import TransformersConfig

ServedModel: TypeAlias = "ModelConfig | TransformersConfig"
_Model = TypeVar("_Model", "ModelConfig", "TransformersConfig")

_log = logging.getLogger(__name__)


def find_model(config: EngineConfig, startup: StartupProgress) -> Path:
    """Returns the folder of the checkpoint, or of a bundled shape for random weights; downloads what is on the hub.

    Raises: CheckpointError, ConfigError: see `resolve_model`.
    """
    if config.load_format == "dummy" and (shape := find_shape(config.model)) is not None:
        _log.info("Using the bundled shape %s: %s", config.model, shape)
        return shape

    def check(folder: Path) -> None:
        check_folder(
            folder,
            is_dummy=config.load_format == "dummy",
            is_without_weights=True,
            model_impl=config.model_impl,
            layout=config.layout,
        )

    return resolve_model(config.model, check, startup.update)


def open_model(model_dir: Path, config: EngineConfig, device: torch.device) -> ServedModel:
    """Returns the configuration of a checkpoint that is computed on a device.

    Raises:
        CheckpointError: the model cannot be served; says why.
        ConfigError: a flag is not supported with what computes it.
    """
    native = check_folder(
        model_dir,
        is_dummy=config.load_format == "dummy",
        model_impl=config.model_impl,
        layout=config.layout,
    )
    if native is not None:
        windows = native.traits.sliding_windows
        return _with_cache_groups(native, tuple(windows[layer] for layer in native.attention_layers), config)
    from engine.model.transformers_probe import TransformersConfig

    model = TransformersConfig.from_dir(
        model_dir, may_keep_latents=_may_keep_latents(config, device), may_share_latents=device.type != "cpu"
    )
    if config.batch_invariant:
        raise ConfigError(
            f"--batch-invariant is not supported for {model.name}, which is computed by transformers, whose order of "
            "summation may depend on the batch: omit it"
        )
    _log.info(
        "%s is computed by transformers, with Chairlift's attention, linear layers and experts: a step takes 1.1 to 3 "
        "times the time of an architecture of Chairlift's own on a CPU (docs/models.md)",
        model.name,
    )
    return _with_cache_groups(model, model.sliding_windows, config)


def _may_keep_latents(config: EngineConfig, device: torch.device) -> bool:
    if config.enable_lora:  # adapters may change the matrix that expands them
        return False
    if device.type == "cpu" or config.uses_torch_kernels("cuda") or config.other_attention == "torch":
        return True
    return config.other_attention is None and takes_latents(device)


def _with_cache_groups(model: _Model, windows: tuple[int | None, ...], config: EngineConfig) -> _Model:
    """Divides the KV cache by the windows of the layers, as far as requests may be longer.

    Attention of other projects also reads in front of a window, where blocks may be of other requests.
    """
    if config.other_attention is not None:
        return model
    max_model_len = config.max_model_len or model.shape.max_position_embeddings
    shorter = [None if window is None or window >= max_model_len else window for window in windows]
    groups = group_layers(model.shape.layers, shorter)
    if isinstance(model, ModelConfig):
        of_layers = dict(zip(model.attention_layers, groups.of_layers, strict=True))
        layer_groups = tuple(of_layers.get(layer, 0) for layer in range(model.num_layers))
        return replace(model, cache_groups=groups.cache_groups, layer_groups=layer_groups)
    layers = tuple(
        layer._replace(group=group) for layer, group in zip(model.shape.layers, groups.of_layers, strict=True)
    )
    return replace(model, shape=replace(model.shape, layers=layers, cache_groups=groups.cache_groups))


def weights_dtype(model: ServedModel, model_dir: Path, config: EngineConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of weights, and on a GPU of activations.

    Raises: CheckpointError, ConfigError: see `cpu_checkpoint_dtype` and `resolve_dtype`.
    """
    if device.type != "cpu":
        return resolve_dtype(config.dtype, model.shape.checkpoint_dtype)
    if config.uses_torch_kernels("cpu"):
        return resolve_dtype(config.dtype, "float32", is_fp32_only=True)
    path = None if config.load_format == "dummy" else model_dir
    if isinstance(model, ModelConfig):
        return resolve_dtype(config.dtype, cpu_checkpoint_dtype(path, model))
    return resolve_dtype(config.dtype, model.shape.checkpoint_dtype if path is None else model.exact_dtype())


def shard_of(model: ServedModel, group: ParallelGroup) -> ServedModel:
    """Returns the configuration of this rank's shard; transformers has one rank.

    Raises: ConfigError: the model cannot be divided among the ranks.
    """
    if isinstance(model, ModelConfig):
        return Sharding.of(model, group).config_of(model)
    return model


def shard_shape(model: ServedModel, group: ParallelGroup) -> ModelShape:
    """Returns the sizes of this rank's shard."""
    return shard_of(model, group).shape


def check_weights_of(model: ServedModel, model_dir: Path, dtype: torch.dtype, group: ParallelGroup) -> None:
    """Checks the headers of the weights, before the long load.

    Raises: CheckpointError, ConfigError: see `check_checkpoint`.
    """
    if isinstance(model, ModelConfig):
        check_checkpoint(model_dir, model, dtype, group=group)
    else:
        check_headers(model_dir)


def bytes_of_weights(
    model: ServedModel,
    dtype: torch.dtype,
    group: ParallelGroup,
    quantization: Literal["fp8", "int8"] | None,
    *,
    kept: Kept,
    is_compact: bool = False,
) -> int:
    """Returns the bytes of this rank's packed weights; see `weights_bytes`."""
    if isinstance(model, ModelConfig):
        return weights_bytes(model, dtype, group=group, quantization=quantization, kept=kept, is_compact=is_compact)
    model_dtype = torch.float32 if is_compact else dtype
    is_quantized = quantization is not None
    return model.packed_bytes(dtype, model_dtype, is_quantized=is_quantized, kept=kept, is_compact=is_compact)


def load(
    model: ServedModel,
    model_dir: Path,
    ops: KernelOps,
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    group: ParallelGroup,
    progress: Progress,
) -> StepModel:
    """Loads and packs this rank's weights.

    Args:
        model: the whole model.
        model_dir: its folder.
        ops: operations of the model.
        config: the engine's configuration.
        dtype: of weights, and on a GPU of activations.
        device: of weights and activations.
        max_model_len: longest sequence; None: the context length of the checkpoint.
        group: the ranks that share the model.
        progress: called with the bytes read so far and the total.
    Raises: CheckpointError, ConfigError: see `load_model` and `TransformersModel`.
    """
    if isinstance(model, ModelConfig):
        return load_model(
            model_dir,
            model,
            ops,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            load_format=config.load_format,
            seed=config.seed,
            group=group,
            progress=progress,
            packed_cache=packed_cache(config, model_dir, ops, dtype, group),
        )
    from engine.model.transformers_model import TransformersModel

    if config.packed_cache is not None:
        _log.warning("--packed-cache is not used for %s, which is computed by transformers", model.name)
    return TransformersModel(
        model,
        ops,
        dtype=torch.float32 if device.type == "cpu" else dtype,
        weights_dtype=dtype,
        device=device,
        max_model_len=max_model_len or model.shape.max_position_embeddings,
        is_dummy=config.load_format == "dummy",
        seed=config.seed,
        progress=progress,
    )
