"""The gated delta rule (arXiv:2412.06464) as two instructions, of the convolution and of the rule; all sums are fp32.

An item is one request and some channels, or one of its heads, and takes the request's tokens in their order. So the
bits of a token do not depend on other requests, or on how a prompt is divided into chunks.
"""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.cpu.arrays import check_fp32, check_integers
from kernels.cpu.delta_step import NUM_VECTORS, UNROLLED, delta_step, delta_step_of_one
from kernels.cpu.instruction import FIRST_OPERAND, ROWS, SCRATCH_BYTES, Opcode, item_kernel, num_rows
from kernels.cpu.intrinsics import floats_at, words_at
from kernels.cpu.jit import exp_nonpositive, inline, kernel
from kernels.cpu.pointwise import check_rows, norm_row, sigmoid
from kernels.cpu.recording import Recording
from kernels.cpu.tile import LANES
from kernels.delta_rule import NORM_EPS, DeltaStates, DeltaWeights, check_delta
from kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Longs

_QUERY_START, _SEQ_LENS, _SLOTS, _PARTS, _X, _WIDTH = range(FIRST_OPERAND, FIRST_OPERAND + 6)
_STATES, _STATE_STEP, _CHANNELS, _CONV_WIDTH, _CONV = range(FIRST_OPERAND + 6, FIRST_OPERAND + 11)
_KEY_HEADS, _ADJACENT, _KEY_DIM, _VALUE_DIM, _GATES, _DECAY, _DT_BIAS, _NORM, _OUT = range(
    FIRST_OPERAND + 8, FIRST_OPERAND + 17
)

_PART = 512  # channels of an item of the convolution
_BATCH = 32  # tokens that some columns of a state take before the next columns do
_COLUMNS = NUM_VECTORS * LANES


def emit_delta_rule(
    recording: Recording,
    x: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """See `kernels.interface.KernelOps.delta_rule`; the convolution is written to x.

    Raises: ValueError: not fp32, rows that are not int32, shapes disagree, or sizes that are not supported.
    """
    check_rows(x=x, gates=gates)
    heads = weights.heads
    slots = check_delta(x, gates, weights, states, metadata.state_slots)
    bounds, seq_lens = metadata.query_start_loc, metadata.seq_lens
    check_integers(torch.int32, query_start_loc=bounds, seq_lens=seq_lens, state_slots=slots)
    if slots.shape != seq_lens.shape:
        raise ValueError(f"the batch has {len(seq_lens)} rows and {len(slots)} state_slots")
    check_fp32(conv=weights.conv, decay=weights.decay, dt_bias=weights.dt_bias, norm=weights.norm)
    check_fp32(conv_states=states.conv, states=states.recurrent)
    if heads.key_dim % UNROLLED or heads.value_dim % LANES:
        raise ValueError(
            f"key_dim is {heads.key_dim}, value_dim {heads.value_dim}; expected multiples of {UNROLLED} and {LANES}"
        )
    if 4 * max(heads.conv_width * _PART, _BATCH * (2 * heads.key_dim + 2)) > SCRATCH_BYTES:
        raise ValueError(f"{heads} are too large for the scratch memory of a thread")
    rows = bounds.data_ptr(), seq_lens.data_ptr(), slots.data_ptr()
    recording.emit(
        Opcode.CONVOLVE,
        seq_lens,
        *rows,
        -(-heads.num_channels // _PART),
        x.data_ptr(),
        x.shape[1],
        states.conv.data_ptr(),
        states.conv.stride(0),
        heads.num_channels,
        heads.conv_width,
        weights.conv.data_ptr(),
    )
    out = recording.empty(x, heads.value_size)
    recording.emit(
        Opcode.DELTA_RULE,
        seq_lens,
        *rows,
        heads.num_value_heads,
        x.data_ptr(),
        x.shape[1],
        states.recurrent.data_ptr(),
        states.recurrent.stride(0),
        heads.num_key_heads,
        heads.num_adjacent,
        heads.key_dim,
        heads.value_dim,
        gates.data_ptr(),
        weights.decay.data_ptr(),
        weights.dt_bias.data_ptr(),
        weights.norm.data_ptr(),
        out.data_ptr(),
        value=weights.eps,
    )
    recording.keep((weights, states, metadata))
    return out


@kernel
def num_delta_items(row: "Longs") -> int:
    """Returns the number of items of either instruction: parts of each request."""
    return num_rows(row[ROWS]) * int(row[_PARTS])


@item_kernel
def convolve_item(row: "Longs", _value: np.float32, item: int, scratch: int) -> None:
    """Replaces some channels of a request's tokens by their causal convolution and SiLU; updates its state."""
    request, part = item // row[_PARTS], item % row[_PARTS]
    begin, end, seq_len, slot = _row(row, request)
    if seq_len == 0:
        return
    num_channels, width = row[_CHANNELS], row[_CONV_WIDTH]
    first = part * _PART
    n = min(_PART, num_channels - first)
    conv, state = row[_CONV] + 4 * first, row[_STATES] + 4 * (row[_STATE_STEP] * slot + first)
    window, sums = scratch, floats_at(scratch + 4 * _PART * (width - 1), n)  # the window is a ring of inputs
    for i in range(width - 1):
        past, kept = floats_at(window + 4 * _PART * i, n), floats_at(state + 4 * num_channels * i, n)
        for j in range(n):
            past[j] = kept[j] if seq_len > end - begin else np.float32(0)
    oldest = 0
    for token in range(begin, end):
        x = floats_at(row[_X] + 4 * (row[_WIDTH] * token + first), n)
        last = floats_at(conv + 4 * num_channels * (width - 1), n)
        for j in range(n):
            sums[j] = last[j] * x[j]
        for i in range(width - 1):
            past = floats_at(window + 4 * _PART * ((oldest + i) % (width - 1)), n)
            factors = floats_at(conv + 4 * num_channels * i, n)
            for j in range(n):
                sums[j] += factors[j] * past[j]
        replaced = floats_at(window + 4 * _PART * oldest, n)
        for j in range(n):
            replaced[j] = x[j]
        for j in range(n):
            x[j] = sums[j] * sigmoid(sums[j])
        oldest = (oldest + 1) % (width - 1)
    for i in range(width - 1):
        past = floats_at(window + 4 * _PART * ((oldest + i) % (width - 1)), n)
        kept = floats_at(state + 4 * num_channels * i, n)
        for j in range(n):
            kept[j] = past[j]


@item_kernel
def delta_rule_item(row: "Longs", eps: np.float32, item: int, scratch: int) -> None:
    """Takes the tokens of a request through one head, from its state to the norm and the gate of its results."""
    num_heads, key_dim, value_dim = row[_PARTS], row[_KEY_DIM], row[_VALUE_DIM]
    request, head = item // num_heads, item % num_heads
    begin, end, seq_len, slot = _row(row, request)
    out, out_step = row[_OUT] + 4 * value_dim * head, 4 * value_dim * num_heads
    if seq_len == 0:
        for token in range(begin, end):
            floats_at(out + out_step * token, value_dim)[:] = np.float32(0)
        return
    state = row[_STATES] + 4 * (row[_STATE_STEP] * slot + key_dim * value_dim * head)
    if seq_len == end - begin:
        floats_at(state, key_dim * value_dim)[:] = np.float32(0)
    norm = floats_at(row[_NORM], value_dim)
    value = row[_X] + 4 * (2 * row[_KEY_HEADS] * key_dim + value_dim * head)
    for first in range(begin, end, _BATCH):
        last = min(first + _BATCH, end)
        _prepare(row, head, first, last, scratch)
        _run_columns(row, value, state, out, first, last, scratch)
        for token in range(first, last):
            result = floats_at(out + out_step * token, value_dim)
            z = floats_at(value + 4 * (row[_WIDTH] * token + value_dim * num_heads), value_dim)
            norm_row(result, norm, eps, result)
            for j in range(value_dim):
                result[j] *= z[j] * sigmoid(z[j])


@inline
def _prepare(row: "Longs", head: int, first: int, last: int, scratch: int) -> None:
    """Writes queries, keys and the factors kept and beta of tokens first to last - 1 of a head to the scratch memory.

    It has [_BATCH, key_dim] queries, as many keys, and [_BATCH, 2] factors.
    """
    num_heads, key_heads, key_dim = row[_PARTS], row[_KEY_HEADS], row[_KEY_DIM]
    rate, bias = floats_at(row[_DECAY], num_heads)[head], floats_at(row[_DT_BIAS], num_heads)[head]
    key_head = head // row[_ADJACENT] % key_heads
    for token in range(first, last):
        x = row[_X] + 4 * (row[_WIDTH] * token + key_dim * key_head)
        query = scratch + 4 * key_dim * (token - first)
        key = query + 4 * key_dim * _BATCH
        _unit(floats_at(x, key_dim), np.float32(1 / math.sqrt(key_dim)), floats_at(query, key_dim))
        _unit(floats_at(x + 4 * key_dim * key_heads, key_dim), np.float32(1), floats_at(key, key_dim))
        gates = floats_at(row[_GATES] + 8 * num_heads * token, 2 * num_heads)
        factors = floats_at(scratch + 8 * key_dim * _BATCH + 8 * (token - first), 2)
        # softplus(y) = max(y, 0) + log(1 + exp(-|y|))
        y = gates[num_heads + head] + bias
        softplus = max(y, np.float32(0)) + np.float32(math.log1p(exp_nonpositive(-abs(y))))
        factors[0], factors[1] = exp_nonpositive(-rate * softplus), sigmoid(gates[head])


@inline
def _run_columns(row: "Longs", value: int, state: int, out: int, first: int, last: int, scratch: int) -> None:
    """Takes prepared tokens through the columns of a head, some columns after the other."""
    num_heads, key_dim, value_dim = row[_PARTS], row[_KEY_DIM], row[_VALUE_DIM]
    for column in range(0, value_dim, _COLUMNS):
        for token in range(first, last):
            query = scratch + 4 * key_dim * (token - first)
            key = query + 4 * key_dim * _BATCH
            factors = floats_at(scratch + 8 * key_dim * _BATCH + 8 * (token - first), 2)
            given = value + 4 * (row[_WIDTH] * token + column)
            result = out + 4 * (value_dim * num_heads * token + column)
            place = state + 4 * column
            if column + _COLUMNS <= value_dim:
                delta_step(place, 4 * value_dim, key_dim, key, query, given, result, factors[0], factors[1])
            else:
                delta_step_of_one(place, 4 * value_dim, key_dim, key, query, given, result, factors[0], factors[1])


@inline
def _row(row: "Longs", request: int) -> tuple[int, int, int, int]:
    """Returns first token and end of a row of the batch, the length of its sequence and its slot."""
    starts = words_at(row[_QUERY_START] + 4 * request, 2)
    seq_len, slot = words_at(row[_SEQ_LENS] + 4 * request, 1)[0], words_at(row[_SLOTS] + 4 * request, 1)[0]
    return int(starts[0]), int(starts[1]), int(seq_len), int(slot)


@inline
def _unit(x: "Floats", scale: np.float32, out: "Floats") -> None:
    """Computes out = x / sqrt(sum(x^2) + NORM_EPS) * scale."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = scale / np.sqrt(total + np.float32(NORM_EPS))
    for i in range(x.shape[0]):
        out[i] = x[i] * factor
