"""Rows of activations in 8 bits with one scale per row, the input of quantised layers in `kernels.gpu.linear`."""

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
        scales: [T, 1] fp32, the largest magnitude of each row over the format's largest value; 1 for rows of zeros.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns [T, n] in another dtype; computed in fp32."""
        return (self.values.float() * self.scales).to(dtype)


def empty_rows(
    like: torch.Tensor, n: int, quantize: torch.dtype | None
) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor, torch.Tensor]:
    """Allocates a result of n values for each row of `like`, in its dtype or quantised to an 8-bit float.

    Returns: the result, and the tensors that a kernel writes: values, and scales, which are unused if not quantised.
    """
    num_rows = like.shape[0]  # len() of a tensor is slow
    values = torch.empty(num_rows, n, dtype=quantize or like.dtype, device=like.device)
    if quantize is None:
        return values, values, values
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=like.device)
    return QuantizedRows(values, scales), values, scales


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Quantises rows, such as the output of attention.

    Args:
        x: [T, n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`.
        dtype: the target's 8-bit float.
    Raises: ValueError: another shape or dtype.
    """
    check_rows(x=x)
    num_rows, n = x.shape
    tile = row_tile(n, x.itemsize)
    rows, values, scales = empty_rows(x, n, dtype)
    assert isinstance(rows, QuantizedRows)
    launch(
        _quantize_rows_kernel,
        (triton.cdiv(num_rows, tile.block_m),),
        x,
        values,
        scales,
        num_rows,
        N=n,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
    )
    return rows


@triton.jit
def store_quantized_rows(values_ptrs, scales_ptrs, x, rows_mask, mask):  # type: ignore[no-untyped-def]
    """Writes a tile [BLOCK_M, BLOCK_N] of whole rows, zeros where masked, with the scale of each row."""
    scale, factor = float8_scale(tl.max(tl.abs(x), axis=1), values_ptrs.dtype.element_ty)
    store_float8(values_ptrs, x * factor[:, None], mask)
    tl.store(scales_ptrs, scale, mask=rows_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, values_ptr, scales_ptr, num_rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Quantises BLOCK_M whole rows, each with its own scale."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    starts = rows[:, None] * N
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(x_ptr + starts + columns, mask=mask, other=0.0).to(tl.float32)
    store_quantized_rows(values_ptr + starts + columns, scales_ptr + rows, x, rows < num_rows, mask)
