"""RMSNorm (arXiv:1910.07467), plain and after a residual addition, with its result in the model's dtype or in 8 bits.

A row is read once, kept in registers, and written once.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import BoundKernel
from kernels.gpu.quantize import QuantizedRows, checked_group_size, empty_rows, store_quantized_rows
from kernels.gpu.rows import bind_rows, check_rows


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    quantize: torch.dtype | None = None,
    group_size: int | None = None,
) -> torch.Tensor | QuantizedRows:
    """Scales each row to a root mean square of one, then by weight; computed in fp32.

    Args:
        x: [T, n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`.
        weight: [n].
        eps: added to the mean square.
        quantize: the target's 8-bit float, or None for the dtype of x.
        group_size: number of adjacent 8-bit values that share a scale, a power of two; None: those of a row.
    Returns: [T, n], dtype of x, or quantised.
    Raises: ValueError: another shape or dtype, or groups that do not divide the row.
    """
    return _normed(x, None, weight, eps, quantize, group_size)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    quantize: torch.dtype | None = None,
    group_size: int | None = None,
) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
    """Adds x to the residual stream in place and norms the stored sum.

    Args:
        x, residual: [T, n], contiguous, same dtype.
        weight, eps, quantize, group_size: as in `rms_norm`.
    Returns: (norm of the sum, residual), the latter never quantised.
    Raises: ValueError: another shape or dtype, or groups that do not divide the row.
    """
    check_rows(residual=residual)
    if x.shape != residual.shape or x.dtype is not residual.dtype:
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)}, residual {residual.dtype} of {list(residual.shape)}"
        )
    return _normed(x, residual, weight, eps, quantize, group_size), residual


def norm_columns(x: torch.Tensor, first: int, weight: torch.Tensor, eps: float) -> None:
    """Norms columns first:first + n of each row in place.

    Args:
        x: [T, m], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`.
        first: the first column.
        weight: [n].
        eps: added to the mean square.
    Raises: ValueError: another shape or dtype.
    """
    check_rows(x=x)
    num_rows, width = x.shape
    if weight.ndim != 1 or not 0 <= first <= width - len(weight):
        raise ValueError(f"columns from {first} on by a weight of shape {list(weight.shape)}: x has {width} columns")
    n = len(weight)
    launch, block_m = _bind(n, x.itemsize, False, 0, width)
    columns = x[:, first : first + n]
    launch((-(-num_rows // block_m),), columns, columns, weight, columns, columns, num_rows, eps)


def _normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    quantize: torch.dtype | None,
    group_size: int | None,
) -> torch.Tensor | QuantizedRows:
    check_rows(x=x)
    num_rows, n = x.shape
    if weight.shape != (n,):
        raise ValueError(f"weight has shape {list(weight.shape)}, rows of x have {n} values")
    values_per_scale = checked_group_size(n, quantize, group_size)
    launch, block_m = _bind(n, x.itemsize, residual is not None, values_per_scale, n)
    out, values, scales = empty_rows(x, n, quantize, values_per_scale)
    grid = (-(-num_rows // block_m),)
    launch(grid, x, x if residual is None else residual, weight, values, scales, num_rows, eps)
    return out


@cache
def _bind(n: int, itemsize: int, adds: bool, group_size: int, stride: int) -> tuple[BoundKernel, int]:
    """Returns the kernel for rows of n values, stride values apart, and its rows per program."""
    return bind_rows(_rms_norm_kernel, n, itemsize, STRIDE=stride, ADDS=adds, GROUP_SIZE=group_size)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Norms BLOCK_M whole rows, into 8 bits unless GROUP_SIZE is 0; with ADDS, of the sum that it first stores in the
    residual.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    starts = rows[:, None] * STRIDE
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
        total = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + starts + columns, total, mask=mask)
        x = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    y = x * factor[:, None] * weight
    if GROUP_SIZE:
        store_quantized_rows(out_ptr + starts + columns, scales_ptr, y, rows, rows < num_rows, mask, N, GROUP_SIZE)
    else:
        tl.store(out_ptr + starts + columns, y.to(out_ptr.dtype.element_ty), mask=mask)
