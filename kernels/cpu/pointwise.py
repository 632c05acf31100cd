"""Operations on single rows: RMSNorm (arXiv:1910.07467), gates (arXiv:2002.05202), shared experts, soft cap."""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32, check_stored
from kernels.cpu.instruction import FIRST_OPERAND, Opcode, first_row, item_kernel
from kernels.cpu.intrinsics import floats_at
from kernels.cpu.jit import bits_float, exp_nonpositive, inline, inline_in_order
from kernels.cpu.recording import Recording
from kernels.cpu.soft_cap import cap_scores
from kernels.gates import ClampedGate, Gate

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Longs

_X, _OUT, _N, _WEIGHT, _RESIDUAL = range(FIRST_OPERAND, FIRST_OPERAND + 5)
_STEP = FIRST_OPERAND + 4  # of RMS_NORM, after _WEIGHT: bytes between rows
_KIND, _LIMIT = FIRST_OPERAND + 3, FIRST_OPERAND + 4  # of GATE, after _N; bits of the limit
_GATE, _GATE_STEP = FIRST_OPERAND + 3, FIRST_OPERAND + 4  # of GATE_COLUMNS, after _N; bytes between rows
_SHARED = FIRST_OPERAND + 4  # of ADD_SHARED, after _WEIGHT

_SILU, _GELU, _CLAMPED = range(3)  # kinds of gates


def emit_rms_norm(recording: Recording, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each row of x [T, n] to a root mean square of one, then by weight [n] of any type of weights.

    Raises: ValueError: x is not fp32, or shapes disagree.
    """
    check_rows(x=x)
    weight = _widened_weight(x, weight)
    out = recording.empty(x, x.shape[1])
    operands = x.data_ptr(), out.data_ptr(), x.shape[1], weight.data_ptr(), 4 * x.shape[1]
    recording.emit(Opcode.RMS_NORM, x, *operands, value=eps)
    recording.keep(weight)
    return out


def emit_norm_columns(recording: Recording, x: torch.Tensor, first: int, weight: torch.Tensor, eps: float) -> None:
    """Norms columns first:first + n of x [T, m] in place, by weight [n] of any type of weights.

    Raises: ValueError: x is not fp32 or contiguous, or has fewer columns.
    """
    check_rows(x=x)
    check_stored(weight=weight)
    n, width = len(weight), x.shape[1]
    if weight.ndim != 1 or not 0 <= first <= width - n:
        raise ValueError(f"columns from {first} on by a weight of shape {list(weight.shape)}: x has {width} columns")
    weight, start = weight.float(), x.data_ptr() + 4 * first
    recording.emit(Opcode.RMS_NORM, x, start, start, n, weight.data_ptr(), 4 * width, value=eps)
    recording.keep(weight)


def emit_add_rms_norm(
    recording: Recording, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x [T, n] to the residual stream, in place, and norms the sum: (rms_norm(x + residual), residual).

    Raises: ValueError: not fp32, or shapes disagree.
    """
    check_rows(x=x, residual=residual)
    weight = _widened_weight(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x has shape {list(x.shape)}, residual {list(residual.shape)}")
    out = recording.empty(x, x.shape[1])
    recording.emit(
        Opcode.ADD_RMS_NORM,
        x,
        x.data_ptr(),
        out.data_ptr(),
        x.shape[1],
        weight.data_ptr(),
        residual.data_ptr(),
        value=eps,
    )
    recording.keep(weight)
    return out, residual


def emit_gate_and_mul(recording: Recording, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """[T, 2 * n] -> [T, n]: the second half gated by the first one, see `kernels.interface.KernelOps`.

    Raises: ValueError: not fp32, or not contiguous.
    """
    check_rows(gate_up=gate_up)
    n = gate_up.shape[1] // 2
    out = recording.empty(gate_up, n)
    if isinstance(gate, ClampedGate):
        kind, alpha, limit = _CLAMPED, gate.alpha, int(np.float32(gate.limit).view(np.int32))
    else:
        kind, alpha, limit = _GELU if gate == "gelu_and_mul" else _SILU, 0.0, 0
    recording.emit(Opcode.GATE, gate_up, gate_up.data_ptr(), out.data_ptr(), n, kind, limit, value=alpha)
    return out


def emit_gate_columns(recording: Recording, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiplies x [T, n] by sigmoid(gate), in place; gate [T, n] may be columns of wider rows.

    Raises: ValueError: not fp32, x is not contiguous, or shapes disagree.
    """
    check_rows(x=x)
    check_fp32(gate=gate)
    if gate.shape != x.shape or gate.stride(1) != 1:
        raise ValueError(f"gate of shape {list(gate.shape)} and strides {gate.stride()}, x has shape {list(x.shape)}")
    recording.emit(Opcode.GATE_COLUMNS, x, x.data_ptr(), x.data_ptr(), x.shape[1], gate.data_ptr(), 4 * gate.stride(0))
    return x


def emit_add_shared(
    recording: Recording, mixed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """Adds sigmoid(x . gate) * shared to mixed [T, n], in place; shared and x [T, n], gate [n].

    Raises: ValueError: not fp32 or contiguous, or shapes disagree.
    """
    check_rows(mixed=mixed, shared=shared, x=x)
    check_fp32(gate=gate)
    if not mixed.shape == shared.shape == x.shape or gate.shape != mixed.shape[1:] or not gate.is_contiguous():
        raise ValueError(
            f"mixed has shape {list(mixed.shape)}, shared {list(shared.shape)}, x {list(x.shape)}, gate "
            f"{list(gate.shape)} and strides {gate.stride()}"
        )
    operands = x.data_ptr(), mixed.data_ptr(), mixed.shape[1], gate.data_ptr(), shared.data_ptr()
    recording.emit(Opcode.ADD_SHARED, mixed, *operands)
    recording.keep(gate)
    return mixed


def emit_soft_cap(recording: Recording, x: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Replaces x [T, n] by soft_cap * tanh(x / soft_cap), in place.

    Raises: ValueError: not fp32, or not contiguous.
    """
    check_rows(x=x)
    recording.emit(Opcode.SOFT_CAP, x, x.data_ptr(), x.data_ptr(), x.shape[1], value=soft_cap)
    return x


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not [T, n], contiguous, fp32 on the CPU."""
    check_fp32(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(f"{name} of shape {list(tensor.shape)} is not contiguous, or not of two dimensions")


def _widened_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight [n] of a norm in fp32."""
    check_stored(weight=weight)
    if weight.shape != x.shape[1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}, rows of x have {x.shape[1]} values")
    return weight.float()


@inline
def norm_row(x: "Floats", weight: "Floats", eps: np.float32, out: "Floats") -> None:
    """Computes out = x / sqrt(mean(x^2) + eps) * weight; out may be x."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    _scale_row(x, np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps), weight, out)


@inline_in_order
def _scale_row(x: "Floats", factor: np.float32, weight: "Floats", out: "Floats") -> None:
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


@item_kernel
def rms_norm_item(row: "Longs", eps: np.float32, item: int, _scratch: int) -> None:
    """Norms some rows."""
    weight, step = floats_at(row[_WEIGHT], row[_N]), row[_STEP]
    for i in range(first_row(item, row), first_row(item + 1, row)):
        norm_row(floats_at(row[_X] + i * step, row[_N]), weight, eps, floats_at(row[_OUT] + i * step, row[_N]))


@item_kernel
def add_rms_norm_item(row: "Longs", eps: np.float32, item: int, _scratch: int) -> None:
    """Adds and norms some rows."""
    weight, size = floats_at(row[_WEIGHT], row[_N]), 4 * row[_N]
    for i in range(first_row(item, row), first_row(item + 1, row)):
        x, residual = floats_at(row[_X] + i * size, row[_N]), floats_at(row[_RESIDUAL] + i * size, row[_N])
        for j in range(row[_N]):
            residual[j] += x[j]
        norm_row(residual, weight, eps, floats_at(row[_OUT] + i * size, row[_N]))


@inline
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + exp(-x))."""
    one = np.float32(1)
    e = exp_nonpositive(-abs(x))
    return (e if x < 0 else one) / (one + e)


@inline_in_order
def _silu_row(gate: "Floats", up: "Floats", out: "Floats") -> None:
    for j in range(out.shape[0]):
        out[j] = gate[j] * sigmoid(gate[j]) * up[j]


@inline_in_order
def _gelu_row(gate: "Floats", up: "Floats", out: "Floats") -> None:
    """By (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    for j in range(out.shape[0]):
        x = gate[j]
        y = np.float32(2 * math.sqrt(2 / math.pi)) * x * (np.float32(1) + np.float32(0.044715) * x * x)
        out[j] = x * sigmoid(y) * up[j]


@inline_in_order
def _clamped_row(gate: "Floats", up: "Floats", alpha: np.float32, limit: np.float32, out: "Floats") -> None:
    """NaN is below no limit and above none, and stays."""
    for j in range(out.shape[0]):
        g = limit if gate[j] > limit else gate[j]
        u = limit if up[j] > limit else -limit if up[j] < -limit else up[j]
        out[j] = (u + np.float32(1)) * g * sigmoid(alpha * g)


@item_kernel
def gate_item(row: "Longs", alpha: np.float32, item: int, _scratch: int) -> None:
    """Gates some rows by their first halves."""
    n, kind = row[_N], row[_KIND]
    for i in range(first_row(item, row), first_row(item + 1, row)):
        gate, up = floats_at(row[_X] + 8 * n * i, n), floats_at(row[_X] + 8 * n * i + 4 * n, n)
        out = floats_at(row[_OUT] + 4 * n * i, n)
        if kind == _SILU:
            _silu_row(gate, up, out)
        elif kind == _GELU:
            _gelu_row(gate, up, out)
        else:
            _clamped_row(gate, up, alpha, bits_float(np.int32(row[_LIMIT])), out)


@item_kernel
def gate_columns_item(row: "Longs", _value: np.float32, item: int, _scratch: int) -> None:
    """Gates some rows by the sigmoid of others."""
    n = row[_N]
    for i in range(first_row(item, row), first_row(item + 1, row)):
        x, gate = floats_at(row[_X] + 4 * n * i, n), floats_at(row[_GATE] + row[_GATE_STEP] * i, n)
        for j in range(n):
            x[j] *= sigmoid(gate[j])


@item_kernel
def add_shared_item(row: "Longs", _value: np.float32, item: int, _scratch: int) -> None:
    """Adds some rows, each times the sigmoid of a dot product."""
    n, weight = row[_N], floats_at(row[_WEIGHT], row[_N])
    for i in range(first_row(item, row), first_row(item + 1, row)):
        x, shared = floats_at(row[_X] + 4 * n * i, n), floats_at(row[_SHARED] + 4 * n * i, n)
        out, total = floats_at(row[_OUT] + 4 * n * i, n), np.float32(0)
        for j in range(n):
            total += x[j] * weight[j]
        factor = sigmoid(total)
        for j in range(n):
            out[j] += factor * shared[j]


@item_kernel
def soft_cap_item(row: "Longs", soft_cap: np.float32, item: int, _scratch: int) -> None:
    """Caps some rows."""
    n = row[_N]
    for i in range(first_row(item, row), first_row(item + 1, row)):
        cap_scores(floats_at(row[_X] + 4 * n * i, n), soft_cap)
