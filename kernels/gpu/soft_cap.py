"""Soft cap of logits: soft_cap * tanh(x / soft_cap) (Gemma 2, arXiv:2408.00118); that of scores is in `attend.py`."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import BoundKernel
from kernels.gpu.rows import bind_columns, check_rows


def soft_cap(x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Replaces x by soft_cap * tanh(x / soft_cap), in place.

    Args:
        x: [T, n] fp32, contiguous.
        soft_cap: the limit, above zero.
    Returns: x.
    Raises: ValueError: another shape or dtype.
    """
    check_rows(x=x)
    if x.dtype is not torch.float32:
        raise ValueError(f"x is {x.dtype}, expected float32: 16 bits would round logits once more")
    num_rows, n = x.shape
    launch, block_m, num_columns = _bind(n)
    launch((-(-num_rows // block_m), num_columns), x, num_rows, float(soft_cap))
    return x


@cache
def _bind(n: int) -> tuple[BoundKernel, int, int]:
    """Returns the kernel for rows of n values, its rows per program and its programs per row."""
    return bind_columns(_soft_cap_kernel, n)


@triton.jit(do_not_specialize=["num_rows"])
def _soft_cap_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    num_rows,
    soft_cap,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Caps a tile of BLOCK_M rows and BLOCK_N columns."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    places = x_ptr + rows[:, None] * N + columns
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(places, mask=mask, other=0.0) / soft_cap
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    is_near = tl.abs(x) < 0.625  # where 1 - decay cancels: the polynomial of Cephes tanhf
    small = tl.where(is_near, x, 0.0)
    z = small * small
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = (p - 3.33332819422e-1) * z * small + small
    capped = soft_cap * tl.where(is_near, near, tl.where(x < 0, -far, far))
    tl.store(places, capped, mask=mask)
