"""Gates of feed-forward layers (arXiv:2002.05202) and of attention, with results in the model's dtype or in 8 bits."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gates import ClampedGate, Gate
from kernels.gpu.launch import BoundKernel
from kernels.gpu.quantize import QuantizedRows, checked_group_size, empty_rows, store_quantized_rows
from kernels.gpu.rows import bind_tiles, check_columns, check_rows


def gate_and_mul(
    gate_up: torch.Tensor, gate: Gate, *, quantize: torch.dtype | None = None, group_size: int | None = None
) -> torch.Tensor | QuantizedRows:
    """Returns the second half of each row, gated by the first one; computes in fp32.

    Args:
        gate_up: [T, 2 * n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`
            to be quantised.
        gate: see `kernels.interface`.
        quantize: the target's 8-bit float, or None for the dtype of gate_up.
        group_size: number of adjacent 8-bit values that share a scale, a power of two; None: those of a row.
    Returns: [T, n], dtype of gate_up, or quantised.
    Raises: ValueError: another shape or dtype, or groups that do not divide the row.
    """
    check_rows(gate_up=gate_up)
    num_rows, width = gate_up.shape
    n = width // 2
    if width % 2:
        raise ValueError(f"gate_up has rows of {width} values, which are not two halves")
    values_per_scale = checked_group_size(n, quantize, group_size)
    launch, block_m, num_columns = _bind(n, gate_up.itemsize, gate, values_per_scale)
    out, values, scales = empty_rows(gate_up, n, quantize, values_per_scale)
    launch((-(-num_rows // block_m), num_columns), gate_up, values, scales, num_rows)
    return out


def gate_columns(
    x: torch.Tensor, gate: torch.Tensor, *, quantize: torch.dtype | None = None, group_size: int | None = None
) -> torch.Tensor | QuantizedRows:
    """Returns x * sigmoid(gate), computed in fp32.

    Args:
        x: [T, n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES` to be quantised.
        gate: [T, n], dtype of x; may be columns of wider rows.
        quantize, group_size: as in `gate_and_mul`.
    Returns: [T, n], dtype of x, or quantised.
    Raises: ValueError: another shape or dtype, or groups that do not divide the row.
    """
    check_rows(x=x)
    check_columns(gate=gate)
    if x.shape != gate.shape or x.dtype is not gate.dtype:
        raise ValueError(f"x is {x.dtype} of shape {list(x.shape)}, gate {gate.dtype} of {list(gate.shape)}")
    num_rows, n = x.shape
    values_per_scale = checked_group_size(n, quantize, group_size)
    launch, block_m, num_columns = _bind_columns(n, x.itemsize, values_per_scale)
    out, values, scales = empty_rows(x, n, quantize, values_per_scale)
    launch((-(-num_rows // block_m), num_columns), x, gate, values, scales, num_rows, gate.stride(0))
    return out


@cache
def _bind(n: int, itemsize: int, gate: Gate, group_size: int) -> tuple[BoundKernel, int, int]:
    """Returns the kernel for rows of n results, its rows per program and its programs per row."""
    return bind_tiles(
        _gate_kernel,
        n,
        itemsize,
        group_size,
        IS_GELU=gate == "gelu_and_mul",
        ALPHA=gate.alpha if isinstance(gate, ClampedGate) else 0.0,
        LIMIT=gate.limit if isinstance(gate, ClampedGate) else 0.0,
    )


@cache
def _bind_columns(n: int, itemsize: int, group_size: int) -> tuple[BoundKernel, int, int]:
    return bind_tiles(_gate_columns_kernel, n, itemsize, group_size)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    N: tl.constexpr,
    IS_GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gates a tile of BLOCK_M rows and BLOCK_N columns; whole rows in 8 bits unless GROUP_SIZE is 0.

    The gate is clamped if LIMIT is not 0.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    starts = rows[:, None] * N
    mask = (rows < num_rows)[:, None] & (columns < N)
    gate = tl.load(gate_up_ptr + 2 * starts + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * starts + N + columns, mask=mask, other=0.0).to(tl.float32)
    if LIMIT > 0.0:  # NaN is not beyond the limits, and stays
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)
    elif IS_GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z); 2 * sqrt(2 / pi) = 1.5957691...
        y = gate * tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    else:
        y = gate * tl.sigmoid(gate) * up
    if GROUP_SIZE:
        store_quantized_rows(out_ptr + starts + columns, scales_ptr, y, rows, rows < num_rows, mask, N, GROUP_SIZE)
    else:
        tl.store(out_ptr + starts + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_columns_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    gate_stride,
    N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gates a tile of BLOCK_M rows and BLOCK_N columns; whole rows in 8 bits unless GROUP_SIZE is 0."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    offsets = rows[:, None] * N + columns
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows[:, None] * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(gate)
    if GROUP_SIZE:
        store_quantized_rows(out_ptr + offsets, scales_ptr, y, rows, rows < num_rows, mask, N, GROUP_SIZE)
    else:
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)
