"""Rotary position embedding (arXiv:2104.09864, half-split layout) and the write of keys and values to the cache.

One pass over the output of the QKV projection, with an RMSNorm of each head before the rotation where a model has one.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32, check_integers
from kernels.cpu.instruction import FIRST_OPERAND, Opcode, first_row, item_kernel
from kernels.cpu.intrinsics import bytes_at, floats_at, longs_at, shorts_at
from kernels.cpu.jit import inline
from kernels.cpu.kv_cache import CpuKVCache
from kernels.cpu.pointwise import norm_row
from kernels.cpu.quantize import inverse_scale, largest_magnitude, rounded
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES
from kernels.cpu.two_bytes import rounded_to_bf16

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Longs

_QKV, _HEADS, _KV_HEADS, _HEAD_DIM, _POSITIONS, _COS, _SIN, _SLOTS, _BLOCK_SIZE, _K, _V, _K_SCALES, _V_SCALES = range(
    FIRST_OPERAND, FIRST_OPERAND + 13
)
_SIZE, _STEP, _Q_NORM, _K_NORM = range(FIRST_OPERAND + 13, FIRST_OPERAND + 17)  # _STEP: bytes between tokens


def emit_rotate_and_store(
    recording: Recording,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: CpuKVCache,
    slot_mapping: torch.Tensor,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> torch.Tensor:
    """See `kernels.interface.KernelOps.rotate_and_store`.

    Raises: ValueError: another dtype, not in rows, or shapes disagree.
    """
    check_fp32(qkv=qkv, cos=cos, sin=sin)
    check_integers(torch.int64, positions=positions, slot_mapping=slot_mapping)
    if qkv.ndim != 2 or qkv.stride(1) != 1:
        raise ValueError(f"qkv of shape {list(qkv.shape)} has strides {qkv.stride()}; expected rows")
    num_tokens, num_heads = qkv.shape[0], kv_cache.num_query_heads(qkv, cos, sin)
    if not positions.shape == slot_mapping.shape == (num_tokens,):
        raise ValueError(
            f"qkv has {num_tokens} tokens, positions {list(positions.shape)}, slot_mapping {list(slot_mapping.shape)}"
        )
    norms = [norm.float() for norm in head_norms or ()]
    recording.emit(
        Opcode.ROTATE_AND_STORE,
        qkv,
        qkv.data_ptr(),
        num_heads,
        kv_cache.num_kv_heads,
        kv_cache.head_dim,
        positions.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.block_size,
        kv_cache.k.data_ptr(),
        kv_cache.v.data_ptr(),
        kv_cache.k_scales.data_ptr() if kv_cache.is_quantized else 0,
        kv_cache.v_scales.data_ptr() if kv_cache.is_quantized else 0,
        kv_cache.k.element_size(),
        4 * qkv.stride(0),
        *(norm.data_ptr() for norm in norms),
        value=eps,
    )
    recording.keep((positions, cos, sin, slot_mapping, kv_cache, norms))
    return qkv.view(qkv.shape[0], -1, kv_cache.head_dim)[:, :num_heads]


@inline
def _rotate(x: "Floats", cos: "Floats", sin: "Floats") -> None:
    half = cos.shape[0]
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i] = a * cos[i] - b * sin[i]
        x[half + i] = b * cos[i] + a * sin[i]


@inline
def _store(x: "Floats", size: int, target: int, step: int, scales: int, slot: int) -> None:
    """Writes a key or a value in elements of this size, element i to the place i * step; int8 has scales."""
    if size == 2:
        halves = shorts_at(target, x.shape[0] * step)
        for i in range(x.shape[0]):
            halves[i * step] = np.int16(rounded_to_bf16(x[i]) >> np.int32(16))
        return
    if size == 4:
        floats = floats_at(target, x.shape[0] * step)
        for i in range(x.shape[0]):
            floats[i * step] = x[i]
        return
    largest = largest_magnitude(x)
    factor = inverse_scale(largest)
    quantized = bytes_at(target, x.shape[0] * step)
    for i in range(x.shape[0]):
        quantized[i * step] = np.int8(rounded(x[i] * factor))
    floats_at(scales + 4 * slot, 1)[0] = largest / np.float32(127)


@item_kernel
def rotate_and_store_item(row: "Longs", eps: np.float32, item: int, _scratch: int) -> None:
    """Rotates, norms and stores all heads of some tokens."""
    num_heads, num_kv_heads, head_dim, block_size = row[_HEADS], row[_KV_HEADS], row[_HEAD_DIM], row[_BLOCK_SIZE]
    begin, end = first_row(item, row), first_row(item + 1, row)
    positions, slots = longs_at(row[_POSITIONS], end), longs_at(row[_SLOTS], end)
    has_norms, size = row[_Q_NORM] != 0, row[_SIZE]
    half = head_dim // 2
    for token in range(begin, end):
        cos = floats_at(row[_COS] + 4 * half * positions[token], half)
        sin = floats_at(row[_SIN] + 4 * half * positions[token], half)
        block, offset = slots[token] // block_size, slots[token] % block_size
        heads = row[_QKV] + row[_STEP] * token
        for head in range(num_heads + num_kv_heads):
            x = floats_at(heads + 4 * head_dim * head, head_dim)
            if has_norms:
                norm_row(x, floats_at(row[_Q_NORM] if head < num_heads else row[_K_NORM], head_dim), eps, x)
            _rotate(x, cos, sin)
        for head in range(num_kv_heads):
            key = floats_at(heads + 4 * head_dim * (num_heads + head), head_dim)
            value = floats_at(heads + 4 * head_dim * (num_heads + num_kv_heads + head), head_dim)
            first = (block * num_kv_heads + head) * block_size
            group, lane = offset // LANES * LANES, offset % LANES
            place = size * ((first + group) * head_dim + lane)
            _store(key, size, row[_K] + place, LANES, row[_K_SCALES], first + offset)
            _store(value, size, row[_V] + size * (first + offset) * head_dim, 1, row[_V_SCALES], first + offset)
