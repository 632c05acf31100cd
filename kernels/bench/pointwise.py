"""Kernels bound by memory: norms, the gate of the feed-forward layer, rotation with the write to the cache."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Prepared, num_copies, relative_error
from kernels.bench.device import BenchDevice
from kernels.bench.dims import Dims
from kernels.gpu.gate import gate_and_mul
from kernels.gpu.kv_cache import make_kv_cache
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from kernels.gpu.rotate_and_store import rotate_and_store
from kernels.reference import rms_norm as reference_norms
from kernels.reference.gate import gate_and_mul as reference_gate
from kernels.reference.rotate_and_store import rotate_and_store as reference_rotation

_DTYPE = torch.bfloat16
_BYTES = 2  # of a value of it
_EPS = 1e-6
_BLOCK_SIZE = 16
_MAX_POSITIONS = 8192
_MAX_ERROR = 1e-2
_MAX_FLOAT8_ERROR = 4e-2  # 3 bits of mantissa

Made = tuple[Callable[[], object], Callable[[], float]]
"""One set of inputs: the call, and how far its result is off."""


def pointwise_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields each kernel for decode steps and a prefill step, with and without rounding to 8 bits."""
    float8 = device.target.fp8_dtype
    n, m = dims.hidden_size, dims.intermediate_size
    for t in (5,) if quick else (64, 256, 8192):
        for quantize in (None,) if float8 is None else (None, float8):
            out_bytes = _BYTES if quantize is None else 1
            kv_bytes = dims.num_kv_heads * dims.head_dim * out_bytes
            table_bytes = 4 * dims.head_dim  # a row of cos and one of sin, fp32
            qkv_bytes, q_bytes = dims.qkv_size * _BYTES, dims.num_heads * dims.head_dim * _BYTES
            yield _case(
                device, f"rms_norm, {t:,} x {n:,}", quantize, n * _BYTES * t, n * out_bytes * t,
                partial(_norm, device, t, n, quantize),
            )  # fmt: skip
            yield _case(
                device, f"add_rms_norm, {t:,} x {n:,}", quantize, 2 * n * _BYTES * t, n * (_BYTES + out_bytes) * t,
                partial(_add_norm, device, t, n, quantize),
            )  # fmt: skip
            yield _case(
                device, f"silu_and_mul, {t:,} x 2 x {m:,}", quantize, 2 * m * _BYTES * t, m * out_bytes * t,
                partial(_silu, device, t, m, quantize),
            )  # fmt: skip
            yield _case(
                device, f"rotate_and_store, {t:,} tokens", quantize, (qkv_bytes + table_bytes) * t,
                (q_bytes + 2 * kv_bytes) * t, partial(_rotation, device, dims, t, quantize or _DTYPE),
            )  # fmt: skip


def _case(
    device: BenchDevice,
    what: str,
    quantize: torch.dtype | None,
    in_bytes: int,
    out_bytes: int,
    make: Callable[[], Made],
) -> Case:
    def prepare() -> Prepared:
        made = [make() for _ in range(num_copies(device, in_bytes))]
        return Prepared([call for call, _ in made], made[-1][1])

    return Case(
        what=what if quantize is None else f"{what}, to fp8",
        prepare=prepare,
        num_bytes=in_bytes + out_bytes,
        unit="GB/s",
        max_error=_MAX_ERROR if quantize is None else _MAX_FLOAT8_ERROR,
    )


def _norm(device: BenchDevice, num_tokens: int, n: int, quantize: torch.dtype | None) -> Made:
    x, weight = _random(device, num_tokens, n), _random(device, n)

    def call() -> torch.Tensor | QuantizedRows:
        return rms_norm(x, weight, _EPS, quantize=quantize)

    return call, lambda: relative_error(_values(call()), reference_norms.rms_norm(x.float(), weight, _EPS))


def _add_norm(device: BenchDevice, num_tokens: int, n: int, quantize: torch.dtype | None) -> Made:
    x, residual, weight = _random(device, num_tokens, n), _random(device, num_tokens, n), _random(device, n)

    def error() -> float:
        normed, total = add_rms_norm(x, residual.clone(), weight, _EPS, quantize=quantize)
        expected, expected_total = reference_norms.add_rms_norm(x.float(), residual.float(), weight, _EPS)
        return max(relative_error(_values(normed), expected), relative_error(total, expected_total))

    return lambda: add_rms_norm(x, residual, weight, _EPS, quantize=quantize), error


def _silu(device: BenchDevice, num_tokens: int, m: int, quantize: torch.dtype | None) -> Made:
    gate_up = _random(device, num_tokens, 2 * m)

    def call() -> torch.Tensor | QuantizedRows:
        return gate_and_mul(gate_up, "silu_and_mul", quantize=quantize)

    return call, lambda: relative_error(_values(call()), reference_gate(gate_up.float(), "silu_and_mul"))


def _rotation(device: BenchDevice, dims: Dims, num_tokens: int, kv_dtype: torch.dtype) -> Made:
    qkv = _random(device, num_tokens, dims.qkv_size)
    num_blocks = -(-num_tokens // _BLOCK_SIZE) + 1
    cache = make_kv_cache(
        num_blocks,
        _BLOCK_SIZE,
        dims.num_kv_heads,
        dims.head_dim,
        kv_dtype,
        device=device.device,
        target=device.target,
    )
    slots = torch.randperm(num_blocks * _BLOCK_SIZE, device=device.device)[:num_tokens].contiguous()
    positions = torch.arange(num_tokens, device=device.device) % _MAX_POSITIONS
    angles = torch.rand(_MAX_POSITIONS, dims.head_dim // 2, device=device.device) * 6
    cos, sin = angles.cos(), angles.sin()

    def call() -> torch.Tensor:
        return rotate_and_store(qkv, positions, cos, sin, cache, slots, target=device.target)

    def error() -> float:
        shape = (num_blocks, _BLOCK_SIZE, dims.num_kv_heads, dims.head_dim)
        stored = (torch.zeros(shape, device=device.device), torch.zeros(shape, device=device.device))
        expected = reference_rotation(qkv.float(), positions, cos, sin, stored, slots)
        errors = [relative_error(call(), expected)]
        for part, whole in zip(cache.read_slots(slots), stored, strict=True):
            errors.append(relative_error(part, whole.flatten(0, 1)[slots]))
        return max(errors)

    return call, error


def _random(device: BenchDevice, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device.device).to(_DTYPE)


def _values(rows: torch.Tensor | QuantizedRows) -> torch.Tensor:
    return rows.dequantized(torch.float32) if isinstance(rows, QuantizedRows) else rows
