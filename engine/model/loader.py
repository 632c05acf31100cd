"""Loads a model from a checkpoint folder."""

import logging
from pathlib import Path
from typing import Literal

import torch

from engine.errors import ConfigError
from engine.flags import LoadFormat
from engine.model.checkpoint_part import CheckpointPart
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderStage, make_decoder
from engine.model.dummy_weights import RandomWeights
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.int_weights import IntWeights
from engine.model.linear import Kept
from engine.model.mxfp4 import Mxfp4Weights
from engine.model.packed_cache import PackedCache
from engine.model.weights import Progress, WeightsReader, check_weights, exact_dtype
from engine.parallel.group import SINGLE_RANK, ParallelGroup, SingleRank
from kernels.dtypes import dtype_name
from kernels.families import reference_ops
from kernels.interface import KernelOps

_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def resolve_dtype(name: str, checkpoint_dtype: str, *, is_fp32_only: bool = False) -> torch.dtype:
    """Returns the dtype of weights, and on a GPU of activations; on a CPU these are always float32.

    Args:
        name: auto, float32 (float), float16 (half) or bfloat16. `auto` selects the checkpoint's dtype.
        checkpoint_dtype: name of the dtype of the stored weights; on a CPU that of `cpu_checkpoint_dtype`.
        is_fp32_only: whether only float32 is supported, which `auto` then selects.
    Raises: ConfigError: an unknown name, or a dtype that the operations do not support.
    """
    if name == "auto":
        return torch.float32 if is_fp32_only else _DTYPES[checkpoint_dtype]
    if name not in _DTYPES:
        raise ConfigError(f"dtype is {name!r}, supported are auto, {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    if is_fp32_only and dtype is not torch.float32:
        raise ConfigError(
            f"dtype is {name!r}, supported on a CPU by plain PyTorch operations (--kernels torch, "
            "--tensor-parallel-size) are float32 and auto"
        )
    return dtype


def cpu_checkpoint_dtype(path: Path | None, config: ModelConfig) -> str:
    """Returns the name of the dtype that holds all weights of a checkpoint without rounding.

    This is `exact_dtype` of the files, of which tensors that layers keep in float32 in any case do not count. It is
    float32 for 8-bit floats, which are converted, and if embeddings are multiplied by a factor as they are loaded.

    Args:
        path: the checkpoint folder; None: without files, the weights will be random.
        config: result of `ModelConfig.from_dir`.
    Raises: CheckpointError: a file cannot be read.
    """
    traits = config.traits
    if isinstance(config.quantized, Fp8Weights) or traits.embedding_scale != traits.stream_unit:
        return "float32"
    if path is None:
        return config.checkpoint_dtype
    kept = _kept_in_float32(config)
    return dtype_name(exact_dtype(path, lambda name, _: name not in kept))


def _kept_in_float32(config: ModelConfig) -> set[str]:
    """Returns the names of tensors of layers that are in float32 whatever the dtype of weights is."""
    meta = torch.device("meta")
    model = Decoder(config, reference_ops(), max_positions=1, dtype=torch.bfloat16, device=meta)
    parts = (layer.mixer.own_parts() | layer.feed_forward.own_parts() for layer in model.layers)
    return {name for own in parts for name, part in own.items() if part.tensor.dtype is torch.float32}


def weights_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    group: ParallelGroup = SINGLE_RANK,
    quantization: Literal["fp8", "int8"] | None = None,
    kept: Kept = (),
    is_compact: bool = False,
) -> int:
    """Returns the bytes of the packed weights, without allocating them.

    An output head that is tied to the embedding shares its memory, unless it is quantised or embeddings are scaled.

    Args:
        config: the configuration of the model.
        dtype: dtype of the weights that are not in 8 bits.
        group: the group and rank that hold them.
        quantization: 8-bit format to which linear layers are quantised on load: one byte per weight and a scale per
            row. int8 includes the output head.
        kept: kinds of quantised weights of the checkpoint that stay as they are; others are converted to dtype.
        is_compact: whether weights take as little memory as on a CPU: see `GgufWeights.packed_bytes`; an embedding in
            blocks stays so.
    Raises: ConfigError, CheckpointError: see `Decoder`.
    """
    meta = torch.device("meta")
    model = make_decoder(config, reference_ops(), max_positions=1, dtype=dtype, device=meta, group=group)
    tensors = {name: part.tensor for name, part in model.checkpoint_parts().items()}
    num_bytes = 0
    for linear in (linear for layer in model.layers for linear in layer.linears):
        is_quantized = quantization is not None
        num_bytes += linear.packed_bytes(is_quantized_on_load=is_quantized, kept=kept, is_compact=is_compact)
        for name in linear.checkpoint_parts():
            del tensors[name]
    if isinstance(model, Decoder):
        vocabulary = model.vocabulary
        num_bytes += vocabulary.packed_bytes(is_head_int8=quantization == "int8", kept=kept, is_compact=is_compact)
        for name in vocabulary.checkpoint_parts():
            del tensors[name]
    return num_bytes + sum(tensor.nbytes for tensor in tensors.values())


def check_checkpoint(
    path: Path, config: ModelConfig, dtype: torch.dtype, *, group: ParallelGroup = SINGLE_RANK
) -> None:
    """Checks the headers of all weights, which takes milliseconds, before the long load.

    Raises: CheckpointError, ConfigError: see `load_model`.
    """
    check_weights(path, _parts_of_all_stages(config, dtype, group))


def _parts_of_all_stages(config: ModelConfig, dtype: torch.dtype, group: ParallelGroup) -> dict[str, CheckpointPart]:
    """Returns what this rank would hold of a model in one stage, without memory."""
    one_stage = SingleRank(group.rank, group.size)
    meta = torch.device("meta")
    model = Decoder(config, reference_ops(), max_positions=1, dtype=dtype, device=meta, group=one_stage)
    return model.checkpoint_parts()


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns rows and columns of the linear layers that adapters can change, by their names in the checkpoint.

    Raises: ConfigError, CheckpointError: see `Decoder`.
    """
    meta = torch.device("meta")
    return Decoder(config, reference_ops(), max_positions=1, dtype=torch.float32, device=meta).projection_shapes()


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
    packed_cache: PackedCache | None = None,
) -> Decoder | DecoderStage:
    """Creates the model of a checkpoint, and loads and packs its weights one matrix at a time.

    Args:
        path: the checkpoint folder; not read with `dummy`.
        config: result of `ModelConfig.from_dir(path)`.
        ops: operations of the model.
        dtype: dtype of weights and activations.
        device: device of the weights; None: the CPU.
        max_model_len: longest sequence; None: the context length of the checkpoint.
        load_format: `dummy` draws random weights with `seed`; `auto` and `safetensors` read the checkpoint.
        group: the ranks that share the model; this rank loads its shard.
        progress: see `WeightsReader`.
        packed_cache: holds packed weights of earlier starts, and gets those of this one; None: all are packed.

    Raises:
        CheckpointError: see `WeightsReader`.
        ConfigError: the group cannot share the model.
    """
    if load_format == "dummy" and isinstance(config.quantized, IntWeights | GgufWeights | Mxfp4Weights | Fp4Weights):
        raise ConfigError(
            "--load-format dummy is not supported with weights "
            f"of {config.quantized.num_bits} bits: random bits are no weights that a model computes with"
        )
    model = make_decoder(
        config,
        ops,
        max_positions=max_model_len or config.max_position_embeddings,
        dtype=dtype,
        device=device or torch.device("cpu"),
        group=group,
    )
    for rope in dict.fromkeys(config.traits.ropes):
        if rope is not None and rope.short_factors != rope.long_factors:
            _log.info(
                "longrope: the %s factors rotate all requests, because %d positions are served and "
                "original_max_position_embeddings is %d (--max-model-len decides)",
                "long" if rope.uses_long_factors(max_model_len or config.max_position_embeddings) else "short",
                max_model_len or config.max_position_embeddings,
                rope.original_max_position_embeddings,
            )
    own = model.checkpoint_parts()
    parts = own if group.num_stages == 1 else _parts_of_all_stages(config, dtype, group)
    if load_format == "dummy":
        model.load(RandomWeights(parts, seed).fill)
    elif packed_cache is None:
        model.load(WeightsReader(path, parts, own, progress=progress).fill)
    else:
        packed = packed_cache.open(progress)
        reader = WeightsReader(path, parts, own, progress=None if packed.is_stored else progress)
        model.load(reader.fill, packed)
        packed.save()
    return model
