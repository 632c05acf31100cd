"""Calls of the row kernels that together compile all their specializations; see `kernels.gpu.specializations`."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.dtypes import dtype_name
from kernels.gates import Gate
from kernels.gpu.gate import gate_and_mul, gate_columns
from kernels.gpu.kv_cache import make_kv_cache
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.rms_norm import add_rms_norm, norm_columns, rms_norm
from kernels.gpu.rotate_and_store import rotate_and_store
from kernels.gpu.shared_expert import add_shared
from kernels.gpu.soft_cap import soft_cap
from kernels.gpu.targets import Target
from kernels.gpu.tiles import MAX_ROW_BYTES
from kernels.scale_groups import FP8_BLOCK_SIZE

_META = torch.device("meta")
_FEW_SIZES = (576, 4096, 18944)
_SIZES = (64, 576, 896, 1536, 2048, 3072, 4096, 5120, 8192, 14336, 16384, 18944)
_GATES: tuple[Gate, ...] = ("silu_and_mul", "gelu_and_mul")
_GATE_SIZES = (*_SIZES, 28672, 32768)
_VOCAB_SIZE = 256_000
_MAX_LOGITS = 1024  # rows of a step: AMD's compiler distinguishes tensors beyond 2 GiB
_FEW_HEADS = ((9, 3, 64), (32, 8, 128), (28, 4, 80), (8, 1, 256))
_HEADS = tuple(
    (kv_heads * group, kv_heads, head_dim)
    for head_dim in (64, 80, 96, 128, 192, 256)
    for kv_heads, group in ((1, 1), (1, 8), (2, 7), (3, 3), (8, 4), (8, 1))
)


class Call(NamedTuple):
    """A call of a public operation.

    Attributes:
        label: description for reports.
        make: makes the call.
    """

    label: str
    make: Callable[[], object]


def row_calls(target: Target, everything: bool) -> Iterator[Call]:
    """Yields calls of norms, gates and quantisation by row size, and of the rotation by heads, dtype and cache."""
    for dtype in model_dtypes(target, everything) if everything else (target.half_dtype, torch.float32):
        for n in _SIZES if everything else _FEW_SIZES:
            yield from _norms(3, n, dtype, target)
        for n in _GATE_SIZES if everything else _FEW_SIZES:
            yield from _gates(3, n, dtype, target)
        for heads in _HEADS if everything else _FEW_HEADS:
            yield from _rotations(3, heads, dtype, target, (16, 32, 64) if everything else (16,))
    yield _soft_cap(3)


def live_row_calls(target: Target, generator: random.Random) -> Iterator[Call]:
    """Yields calls of the same operations with random numbers of rows."""
    for num_rows in (1, 2, 16, 17, *(generator.randint(1, 20000) for _ in range(8))):
        yield from _norms(num_rows, generator.choice(_FEW_SIZES), target.half_dtype, target)
        yield from _gates(num_rows, generator.choice(_FEW_SIZES), target.half_dtype, target)
        yield from _rotations(num_rows, generator.choice(_FEW_HEADS), target.half_dtype, target, (16,))
        yield _soft_cap(min(num_rows, _MAX_LOGITS))


def model_dtypes(target: Target, everything: bool) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of models whose products are compiled: all, or the most common one."""
    every = (target.half_dtype, torch.float16, torch.float32)
    return tuple(dict.fromkeys(every)) if everything else every[:1]


def _norms(num_rows: int, n: int, dtype: torch.dtype, target: Target) -> Iterator[Call]:
    if n * dtype.itemsize > MAX_ROW_BYTES:
        return
    x, weights = torch.empty(num_rows, n, dtype=dtype, device=_META), _norm_weights(n, dtype)
    for quantize, group_size in _formats(n, target):
        label = _rows_label(n, dtype, quantize, group_size)
        for weight in weights:
            yield Call(label, partial(rms_norm, x, weight, 1e-5, quantize=quantize, group_size=group_size))
            yield Call(label, partial(add_rms_norm, x, x, weight, 1e-5, quantize=quantize, group_size=group_size))
            if quantize is None and weight.dtype is torch.float32:
                yield Call(label, partial(add_shared, x, x, x, weight))
            if quantize is None:
                wider = torch.empty(num_rows, 2 * n, dtype=dtype, device=_META)
                yield Call(f"{label} of {2 * n}", partial(norm_columns, wider, n, weight, 1e-5))
        if quantize is not None:
            yield Call(label, partial(quantize_rows, x, quantize, group_size))


def _norm_weights(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns weights of norms in the dtype of activations, and in fp32 where they are not the stored ones."""
    return [torch.empty(n, dtype=weight_dtype, device=_META) for weight_dtype in dict.fromkeys((dtype, torch.float32))]


def _gates(num_rows: int, n: int, dtype: torch.dtype, target: Target) -> Iterator[Call]:
    gate_up = torch.empty(num_rows, 2 * n, dtype=dtype, device=_META)
    x = torch.empty(num_rows, n, dtype=dtype, device=_META)
    for quantize, group_size in _formats(n, target):
        if quantize is not None and n * dtype.itemsize > MAX_ROW_BYTES:
            continue
        label = _rows_label(n, dtype, quantize, group_size)
        for gate in _GATES:
            yield Call(label, partial(gate_and_mul, gate_up, gate, quantize=quantize, group_size=group_size))
        yield Call(label, partial(gate_columns, x, gate_up[:, n:], quantize=quantize, group_size=group_size))


def _soft_cap(num_rows: int) -> Call:
    logits = torch.empty(num_rows, _VOCAB_SIZE, device=_META)
    return Call(_rows_label(_VOCAB_SIZE, torch.float32, None, None), partial(soft_cap, logits, 30.0))


def _formats(n: int, target: Target) -> Iterator[tuple[torch.dtype | None, int | None]]:
    """Yields 8-bit floats and group sizes of results: none, a scale per row, and scales per group."""
    yield None, None
    if target.fp8_dtype is not None:
        yield target.fp8_dtype, None
        if n % FP8_BLOCK_SIZE == 0:
            yield target.fp8_dtype, FP8_BLOCK_SIZE


def _rows_label(n: int, dtype: torch.dtype, quantize: torch.dtype | None, group_size: int | None) -> str:
    rounded = "" if quantize is None else ", to 8 bits" if group_size is None else f", to 8 bits by {group_size}"
    return f"{dtype_name(dtype)} rows of {n}{rounded}"


def _rotations(
    num_tokens: int, heads: tuple[int, int, int], dtype: torch.dtype, target: Target, block_sizes: tuple[int, ...]
) -> Iterator[Call]:
    num_heads, num_kv_heads, head_dim = heads
    qkv = torch.empty(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=_META)
    whole_numbers = torch.empty(num_tokens, dtype=torch.int64, device=_META)
    table = torch.empty(1024, head_dim // 2, device=_META)
    norms = _norm_weights(head_dim, dtype)
    for block_size in block_sizes:
        for kv_dtype in (dtype, target.fp8_dtype):
            if kv_dtype is None:
                continue
            cache = make_kv_cache(64, block_size, num_kv_heads, head_dim, kv_dtype, device=_META, target=target)
            for head_norms in (None, *((norm, norm) for norm in norms)):
                label = (
                    f"{dtype_name(dtype)}, {num_heads} heads of {head_dim}, {num_kv_heads} of them keys, blocks of "
                    f"{block_size}, cache {dtype_name(kv_dtype)}{'' if head_norms is None else ', norms'}"
                )
                call = partial(rotate_and_store, qkv, whole_numbers, table, table, cache, whole_numbers)
                yield Call(label, partial(call, head_norms=head_norms, eps=1e-5, target=target))
