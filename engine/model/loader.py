"""From a checkpoint folder to a model ready to run."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from engine.errors import ConfigError
from engine.model.architectures import decoder_traits
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.dummy_weights import fill_random_weights
from engine.model.fp8 import FP8_DTYPE
from engine.model.weights import Progress, check_weights, load_weights
from engine.parallel.group import SINGLE_RANK, ParallelGroup
from kernels.families import reference_ops
from kernels.interface import KernelOps

LoadFormat = Literal["auto", "safetensors", "dummy"]

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in.

    Args:
        name: auto, float32 (float), float16 (half) or bfloat16. `auto` is the checkpoint's own on a GPU, and float32 on
            a CPU: there the 16-bit types are emulated or need units few CPUs have.
        config: the checkpoint.
        device: where it will run.
    Raises: ConfigError: an unknown name, or one that the CPU operations do not serve.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.checkpoint_dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}, supported are auto, {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    if device.type == "cpu" and dtype is not torch.float32:
        raise ConfigError(f"dtype is {name!r}, on a CPU only float32 (or auto) is served")
    return dtype


def weights_bytes(
    config: ModelConfig, dtype: torch.dtype, *, group: ParallelGroup = SINGLE_RANK, keeps_fp8: bool = False
) -> int:
    """Bytes of memory that the model's weights take once they are packed; none of it is allocated.

    A head that shares the embedding's weights is packed apart from them.

    Args:
        config: the checkpoint.
        dtype: of weights that are not in 8 bits.
        group: whose rank holds them.
        keeps_fp8: whether the operations multiply with 8-bit weights; those that do not hold them in dtype.
    Raises: ConfigError, CheckpointError: see `Decoder`.
    """
    traits, ops = decoder_traits(config), reference_ops()  # never run: any would do
    meta = torch.device("meta")
    model = Decoder(config, traits, ops, max_positions=1, dtype=dtype, device=meta, group=group)
    tensors = [part.tensor for part in model.checkpoint_parts().values()]
    if config.tie_word_embeddings:
        tensors.append(model.embed_tokens)
    item_bytes = {FP8_DTYPE: 1 if keeps_fp8 else dtype.itemsize}
    return sum(tensor.numel() * item_bytes.get(tensor.dtype, tensor.itemsize) for tensor in tensors)


def check_checkpoint(
    path: Path, config: ModelConfig, dtype: torch.dtype, *, group: ParallelGroup = SINGLE_RANK
) -> None:
    """Looks at the headers of all weights, in ms, before anything else takes time.

    Raises: CheckpointError, ConfigError: see `load_model`.
    """
    meta = torch.device("meta")
    model = Decoder(
        config, decoder_traits(config), reference_ops(), max_positions=1, dtype=dtype, device=meta, group=group
    )
    check_weights(path, model.checkpoint_parts())


def load_model(
    path: Path,
    config: ModelConfig,
    ops: KernelOps,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    max_model_len: int | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    group: ParallelGroup = SINGLE_RANK,
    progress: Progress | None = None,
    on_packed: Callable[[int, int], None] = lambda _done, _total: None,
) -> Decoder:
    """Makes the model of a checkpoint and fills its weights.

    Args:
        path: the checkpoint folder; with `dummy` nothing but its config.json is needed, and that has been read.
        config: from `ModelConfig.from_dir(path)`.
        ops: the kernels to run on.
        dtype: of weights and activations.
        device: where the weights lie; None is the CPU.
        max_model_len: longest sequence; None is what the checkpoint was made for.
        load_format: `dummy` fills random weights drawn with `seed`; `auto` and `safetensors` read the checkpoint.
        group: the ranks that share the model; this one loads its part.
        progress: see `load_weights`.
        on_packed: see `Decoder.pack`.

    Raises:
        CheckpointError: see `load_weights`.
        ConfigError: the group cannot share the model.
    """
    model = Decoder(
        config,
        decoder_traits(config),
        ops,
        max_positions=max_model_len or config.max_position_embeddings,
        dtype=dtype,
        device=device or torch.device("cpu"),
        group=group,
    )
    parts = model.checkpoint_parts()
    if load_format == "dummy":
        fill_random_weights(parts, seed)
    else:
        load_weights(path, parts, progress=progress)
    del parts  # else the loaded form of every matrix would outlive its packing
    model.pack(on_packed)
    return model
