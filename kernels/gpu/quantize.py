"""Rows of activations in 8 bits, the input of quantised layers: with one scale per row, or per group of its values."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.float8 import float8_scale, store_float8
from kernels.gpu.launch import launch
from kernels.gpu.rows import check_rows
from kernels.gpu.tiles import row_tile


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows x [T, n] as values * scales.

    Attributes:
        values: [T, n] in an 8-bit float.
        scales: [T, groups] fp32, the largest magnitude of each group of n / groups adjacent values over the format's
            largest value; 1 for zeros.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def group_size(self) -> int:
        """Number of adjacent values that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns [T, n] in another dtype; computed in fp32."""
        groups = self.values.float().view(*self.scales.shape, self.group_size)
        return (groups * self.scales[:, :, None]).flatten(1).to(dtype)


def empty_rows(
    like: torch.Tensor, n: int, quantize: torch.dtype | None, group_size: int
) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor, torch.Tensor]:
    """Allocates a result of n values for each row of `like`, in its dtype or quantised to an 8-bit float.

    Returns: the result, and the tensors that a kernel writes: values, and scales, which are unused if not quantised.
    """
    num_rows = like.shape[0]  # len() of a tensor is slow
    values = torch.empty(num_rows, n, dtype=quantize or like.dtype, device=like.device)
    if quantize is None:
        return values, values, values
    scales = torch.empty(num_rows, n // group_size, dtype=torch.float32, device=like.device)
    return QuantizedRows(values, scales), values, scales


def checked_group_size(n: int, quantize: torch.dtype | None, group_size: int | None) -> int:
    """Returns the number of values of a row of n that share a scale; 0 if it is not quantised.

    Raises: ValueError: groups do not divide the row.
    """
    if quantize is None:
        return 0
    if group_size is not None and n % group_size:
        raise ValueError(f"rows of {n} values are not divided by groups of {group_size}, which share a scale")
    return group_size or n


def quantize_rows(x: torch.Tensor, dtype: torch.dtype, group_size: int | None = None) -> QuantizedRows:
    """Quantises rows, such as the output of attention.

    Args:
        x: [T, n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`.
        dtype: the target's 8-bit float.
        group_size: number of adjacent values that share a scale, a power of two; None: all values of the row.
    Raises: ValueError: another shape or dtype, or groups that do not divide the row.
    """
    check_rows(x=x)
    num_rows, n = x.shape
    tile = row_tile(n, x.itemsize)
    values_per_scale = checked_group_size(n, dtype, group_size)
    rows, values, scales = empty_rows(x, n, dtype, values_per_scale)
    assert isinstance(rows, QuantizedRows)
    launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, tile.block_m),),
        x,
        values,
        scales,
        num_rows,
        N=n,
        GROUP_SIZE=values_per_scale,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
    )
    return rows


def rows_in_8_bits(
    x: torch.Tensor | QuantizedRows, dtype: torch.dtype, group_size: int, model_dtype: torch.dtype
) -> QuantizedRows:
    """Returns rows with a scale per group of group_size values: x itself, or x quantised, from model_dtype."""
    if isinstance(x, QuantizedRows):
        if x.group_size == group_size:
            return x
        x = x.dequantized(model_dtype)
    return quantize_rows(x, dtype, group_size)


@triton.jit
def store_quantized_rows(  # type: ignore[no-untyped-def]
    values_ptrs, scales_ptr, x, rows, rows_mask, mask, N: tl.constexpr, GROUP_SIZE: tl.constexpr
):
    """Writes a tile [BLOCK_M, BLOCK_N] of whole rows, zeros where masked, and the scales of their groups."""
    FLOAT8: tl.constexpr = values_ptrs.dtype.element_ty
    if GROUP_SIZE == N:
        scale, factor = float8_scale(tl.max(tl.abs(x), axis=1), FLOAT8)
        store_float8(values_ptrs, x * factor[:, None], mask)
        tl.store(scales_ptr + rows, scale, mask=rows_mask)
    else:
        NUM_GROUPS: tl.constexpr = x.shape[1] // GROUP_SIZE
        groups = tl.reshape(x, (x.shape[0], NUM_GROUPS, GROUP_SIZE))
        scale, factor = float8_scale(tl.max(tl.abs(groups), axis=2), FLOAT8)
        store_float8(values_ptrs, tl.reshape(groups * factor[:, :, None], x.shape), mask)
        group = tl.arange(0, NUM_GROUPS)[None, :]
        scales_mask = rows_mask[:, None] & (group < N // GROUP_SIZE)
        tl.store(scales_ptr + rows[:, None] * (N // GROUP_SIZE) + group, scale, mask=scales_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    N: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantises BLOCK_M whole rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    starts = rows[:, None] * N
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    store_quantized_rows(values_ptr + starts + columns, scales_ptr, x, rows, rows < num_rows, mask, N, GROUP_SIZE)
