"""Adds the expert that all tokens of a mixture share, scaled by a gate of each token (arXiv:2407.10671)."""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import BoundKernel
from kernels.gpu.rows import bind_rows, check_rows


def add_shared(mixed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Adds sigmoid(x . gate) * shared to mixed in place, with a dot product per row; computed in fp32.

    Args:
        mixed, shared, x: [T, n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`.
        gate: [n] fp32, contiguous.
    Returns: mixed.
    Raises: ValueError: another shape or dtype.
    """
    check_rows(mixed=mixed, shared=shared, x=x)
    for name, rows in (("shared", shared), ("x", x)):
        if rows.shape != mixed.shape or rows.dtype is not mixed.dtype:
            raise ValueError(
                f"mixed is {mixed.dtype} of shape {list(mixed.shape)}, {name} {rows.dtype} of {list(rows.shape)}"
            )
    num_rows, n = mixed.shape
    if gate.shape != (n,) or gate.dtype is not torch.float32 or not gate.is_contiguous():
        raise ValueError(
            f"gate is {gate.dtype} of shape {list(gate.shape)}, strides {gate.stride()}; expected {n} fp32 values"
        )
    launch, block_m = _bind(n, mixed.itemsize)
    launch((-(-num_rows // block_m),), mixed, shared, x, gate, num_rows)
    return mixed


@cache
def _bind(n: int, itemsize: int) -> tuple[BoundKernel, int]:
    """Returns the kernel for rows of n values, and its rows per program."""
    return bind_rows(_add_shared_kernel, n, itemsize)


@triton.jit(do_not_specialize=["num_rows"])
def _add_shared_kernel(  # type: ignore[no-untyped-def]
    mixed_ptr,
    shared_ptr,
    x_ptr,
    gate_ptr,
    num_rows,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds BLOCK_M whole rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    offsets = rows[:, None] * N + columns
    mask = (rows < num_rows)[:, None] & (columns < N)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + columns, mask=columns < N, other=0.0)
    factor = tl.sigmoid(tl.sum(x * gate, axis=1))
    mixed = tl.load(mixed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total = mixed + factor[:, None] * shared
    tl.store(mixed_ptr + offsets, total.to(mixed_ptr.dtype.element_ty), mask=mask)
