"""Flags and configuration shared by benchmarks of one engine: shape and quantisation."""

import argparse
import dataclasses

from chairlift.bench.benchmark import Settings
from chairlift.bench.shapes import SHAPES, Shape, write_shape
from engine.config import EngineConfig
from engine.flags import DtypeName

_QUICK_SHAPE = "tiny"
_BLOCK_SIZE = 16


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    *,
    shape: str = "0.6B",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
) -> None:
    """Adds --shape, --quantization and --kv-cache-dtype with these defaults."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape, help=f"model shape (default: {shape})")
    parser.add_argument(
        "--quantization",
        choices=("none", "int8"),
        default=quantization,
        help=f"quantization of weights (default: {quantization})",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "int8"),
        default=kv_cache_dtype,
        help=f"dtype of the KV cache (default: {kv_cache_dtype})",
    )


def shape_name(settings: Settings) -> str:
    """Returns the name of the chosen shape, or of the tiny one with --quick."""
    return _QUICK_SHAPE if settings.quick else str(settings.options.shape)


def chosen_shape(settings: Settings) -> Shape:
    """Returns the shape that will be served."""
    return SHAPES[shape_name(settings)]


def engine_config(
    settings: Settings,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    batch_invariant: bool = False,
    dtype: DtypeName = "auto",
) -> EngineConfig:
    """Returns an engine with random weights and a cache just large enough for max_num_seqs sequences of max_model_len.

    Args:
        settings: settings with the flags of `add_engine_arguments`.
        max_num_seqs, max_num_batched_tokens, max_model_len, batch_invariant, dtype: see `EngineConfig`.
    """
    options = settings.options
    return EngineConfig(
        model=str(write_shape(shape_name(settings), settings.scratch)),
        load_format="dummy",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=_BLOCK_SIZE,
        num_gpu_blocks_override=max_num_seqs * -(-max_model_len // _BLOCK_SIZE),
        threads=settings.threads,
        batch_invariant=batch_invariant,
        dtype=dtype,
        quantization=None if options.quantization == "none" else options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def describe(settings: Settings) -> str:
    """Describes the engine of these settings, for notes."""
    options = settings.options
    weights = "fp32" if options.quantization == "none" else options.quantization
    cache = "fp32" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    return f"{shape_name(settings)}, {weights} weights, {cache} KV"


def engine_flags(config: EngineConfig) -> list[str]:
    """Command line that makes an engine of this configuration, without defaults."""
    flags = ["--model", config.model]
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.name == "model" or value == option.default:
            continue
        flag = option.name.removesuffix("_s").replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
