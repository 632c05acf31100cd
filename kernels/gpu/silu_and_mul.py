"""The gate of a gated feed-forward layer (arXiv:2002.05202), with its result in the model's dtype or in 8 bits."""

from typing import Literal, TypeAlias, get_args

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.quantize import QuantizedRows, store_quantized_rows
from kernels.gpu.rows import check_rows
from kernels.gpu.tiles import column_tile, row_tile

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]
"""x * sigmoid(x); x * Phi(x), exact; the same with its approximation by tanh (arXiv:1606.08415)."""

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def silu_and_mul(
    gate_up: torch.Tensor, *, activation: Activation = "silu", quantize: torch.dtype | None = None
) -> torch.Tensor | QuantizedRows:
    """activation(first half) * second half; computed in fp32.

    Args:
        gate_up: [T, 2 * n], contiguous, fp32, fp16 or bf16; n within `kernels.gpu.tiles.MAX_ROW_BYTES`
            to be quantised.
        activation: of the gate.
        quantize: the target's 8-bit float, or None for the dtype of gate_up.
    Returns: [T, n], dtype of gate_up, or quantised with one scale per row.
    Raises: ValueError: another shape, dtype or activation.
    """
    check_rows(gate_up=gate_up)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, known are {', '.join(ACTIVATIONS)}")
    num_rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] != 2 * n:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]} values, which are not two halves")
    if quantize is None:
        tile = column_tile(n)
        out: torch.Tensor | QuantizedRows
        out = values = scales = torch.empty(num_rows, n, dtype=gate_up.dtype, device=gate_up.device)
    else:
        tile = row_tile(n, gate_up.itemsize)
        out = rows = QuantizedRows.empty(num_rows, n, quantize, gate_up.device)
        values, scales = rows.values, rows.scales
    launch(
        _silu_and_mul_kernel,
        (triton.cdiv(num_rows, tile.block_m), triton.cdiv(n, tile.block_n)),
        gate_up,
        values,
        scales,
        num_rows,
        N=n,
        ACTIVATION=activation,
        QUANTIZES=quantize is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
    )
    return out


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # (1 + tanh(z)) / 2 is sigmoid(2 z), here with z = sqrt(2 / pi) * (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    num_rows,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    QUANTIZES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    starts = rows[:, None] * N
    mask = (rows < num_rows)[:, None] & (columns < N)
    gate = tl.load(gate_up_ptr + 2 * starts + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + 2 * starts + N + columns, mask=mask, other=0.0).to(tl.float32)
    y = _activated(gate, ACTIVATION) * up
    if QUANTIZES:
        store_quantized_rows(out_ptr + starts + columns, scales_ptr + rows, y, rows < num_rows, mask)
    else:
        tl.store(out_ptr + starts + columns, y.to(out_ptr.dtype.element_ty), mask=mask)
