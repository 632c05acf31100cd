"""RMSNorm of each head times silu(z), the end of a gated delta rule layer (arXiv:2412.06464)."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import BoundKernel
from kernels.gpu.quantize import QuantizedRows, checked_group_size, empty_rows, store_quantized_rows
from kernels.gpu.rows import bind_tiles


def gated_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor,
    *,
    quantize: torch.dtype | None = None,
    group_size: int | None = None,
    out: torch.Tensor | QuantizedRows | None = None,
) -> torch.Tensor | QuantizedRows:
    """Norms heads and gates them; computed in fp32.

    Args:
        y: [T, num_heads * head_dim] fp32; may be columns of wider rows, as z may.
        z: [T, num_heads * head_dim], fp32, fp16 or bf16; rows within `kernels.gpu.tiles.MAX_ROW_BYTES` to be quantised.
        weight: [head_dim] fp32, contiguous; head_dim is a power of two.
        eps: added to the mean square of a head.
        rows: [T] int32, below 0 for tokens of padding, whose results are zero.
        quantize: the target's 8-bit float, or None for the dtype of z.
        group_size: number of adjacent 8-bit values that share a scale, a power of two; None: those of a row.
        out: for the result, as it is returned; None: it is allocated.
    Returns: [T, num_heads * head_dim], dtype of z, or quantised.
    Raises: ValueError: groups do not divide the row, or the result has another shape or dtype than `out`.
    """
    num_tokens, n = y.shape
    values_per_scale = checked_group_size(n, quantize, group_size)
    launch, block_m, num_columns = _bind(n, z.itemsize, weight.shape[0], values_per_scale)
    if out is None:
        out = empty_rows(z, n, quantize, values_per_scale)[0]
    values, scales = (out.values, out.scales) if isinstance(out, QuantizedRows) else (out, out)
    if values.shape != (num_tokens, n) or values.dtype is not (quantize or z.dtype):
        raise ValueError(
            f"out is {list(values.shape)} {values.dtype}, the result is {[num_tokens, n]} {quantize or z.dtype}"
        )
    launch(
        (triton.cdiv(num_tokens, block_m), num_columns),
        y,
        z,
        weight,
        rows,
        values,
        scales,
        num_tokens,
        y.stride(0),
        z.stride(0),
        eps,
    )
    return out


@cache
def _bind(n: int, itemsize: int, head_dim: int, group_size: int) -> tuple[BoundKernel, int, int]:
    """Returns the kernel for rows of n results, its rows per program and its programs per row."""
    return bind_tiles(_gated_norm_kernel, n, itemsize, group_size, HEAD_DIM=head_dim)


@triton.jit(do_not_specialize=["num_tokens"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    z_ptr,
    weight_ptr,
    rows_ptr,
    out_ptr,
    scales_ptr,
    num_tokens,
    y_stride,
    z_stride,
    eps,
    N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Norms the heads in BLOCK_N columns of BLOCK_M tokens; whole rows in 8 bits unless GROUP_SIZE is 0."""
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    in_batch = tokens < num_tokens
    is_token = tl.load(rows_ptr + tokens, mask=in_batch, other=-1) >= 0
    mask = is_token[:, None] & (columns < N)
    y = tl.load(y_ptr + tokens[:, None] * y_stride + columns, mask=mask, other=0.0)
    z = tl.load(z_ptr + tokens[:, None] * z_stride + columns, mask=mask, other=0.0).to(tl.float32)
    heads = tl.reshape(y, (BLOCK_M, BLOCK_N // HEAD_DIM, HEAD_DIM))
    factor = tl.rsqrt(tl.sum(heads * heads, axis=2) / HEAD_DIM + eps)
    y = tl.reshape(heads * factor[:, :, None], (BLOCK_M, BLOCK_N))
    y *= tl.load(weight_ptr + columns % HEAD_DIM) * z * tl.sigmoid(z)
    mask = in_batch[:, None] & (columns < N)  # padding is written as zeros
    if GROUP_SIZE:
        store_quantized_rows(
            out_ptr + tokens[:, None] * N + columns, scales_ptr, y, tokens, in_batch, mask, N, GROUP_SIZE
        )
    else:
        tl.store(out_ptr + tokens[:, None] * N + columns, y.to(out_ptr.dtype.element_ty), mask=mask)
