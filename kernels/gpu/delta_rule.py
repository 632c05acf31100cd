"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464); `kernels.delta_rule` defines it.

Three kernels. The first is the convolution with SiLU, at any number of tokens at once, with all that does not depend on
the recurrent state: lengths of queries and keys, decays and betas. The second follows each row token by token; a
program keeps a few columns of the state of a head in registers, because columns do not depend on each other. The third
is the norm of each head with its gate.

A token's bits do not depend on other rows, nor on how its prompt is divided into chunks: all sums are within a token,
in one order, and states are fp32 in memory as in registers.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import NORM_EPS, DeltaStates, DeltaWeights, check_delta
from kernels.gpu.gated_norm import gated_norm
from kernels.gpu.launch import BoundKernel
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.rows import check_columns
from kernels.gpu.targets import UnsupportedTargetError
from kernels.gpu.token_rows import token_rows
from kernels.metadata import AttentionMetadata

_DIMS = (16, 32, 64, 128, 256)
_MAX_CONV_WIDTH = 8
_BLOCK_V = 8
"""Columns of a state per program, of one warp: its sums then need no barrier. 128 rows of 8 columns take 32 registers
of each thread, and a prompt of 32 heads of 128 columns fills 128 multiprocessors with a warp for each scheduler."""
_VALUES_PER_PROGRAM = 1024
"""Of the convolution: 8 for each of 128 threads."""


def delta_rule(
    x: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    metadata: AttentionMetadata,
    *,
    quantize: torch.dtype | None = None,
    group_size: int | None = None,
    out: torch.Tensor | QuantizedRows | None = None,
) -> torch.Tensor | QuantizedRows:
    """Computes the rows of a batch and updates the states of their requests; computes in fp32.

    Args:
        x: [T, num_channels + value_size], fp32, fp16 or bf16: queries, keys and values before the convolution, then z.
        gates: [T, 2 * num_value_heads], dtype of x: b, then a. Both may be columns of wider rows.
        weights: of the layer, contiguous; key_dim and value_dim are powers of two from 16 to 256, conv_width up to 8.
        states: contiguous within a slot. A row whose tokens are the first of its request does not read its slot.
        metadata: rows of the batch, read on the device; a row of sequence length 0, and tokens behind the last row, are
            padding.
        quantize: the target's 8-bit float, or None for the dtype of x.
        group_size: number of adjacent 8-bit values that share a scale, a power of two; None: those of a row.
        out: for the result, as it is returned; None: it is allocated.
    Returns: [T, value_size], dtype of x, or quantised; zero for padding.

    Raises:
        ValueError: shapes or dtypes disagree or are not supported.
        UnsupportedTargetError: there are no kernels for these sizes of heads.
    """
    slots = check_delta(x, gates, weights, states, metadata.state_slots)
    heads, num_tokens = weights.heads, x.shape[0]
    _check(x, gates, heads)
    rows = token_rows(metadata, num_tokens)
    mixed = torch.empty(num_tokens, heads.num_channels, dtype=torch.float32, device=x.device)
    results = torch.empty(num_tokens, heads.value_size, dtype=torch.float32, device=x.device)
    factors = torch.empty(num_tokens, 2 * heads.num_value_heads, dtype=torch.float32, device=x.device)
    mix, block_t, follow, num_parts = _bind(heads)
    batch = metadata.query_start_loc, metadata.seq_lens, slots
    mix(
        (triton.cdiv(num_tokens, block_t), 2 * heads.num_key_heads + heads.num_value_heads + 1),
        x,
        gates,
        weights.conv,
        weights.decay,
        weights.dt_bias,
        states.conv,
        rows,
        *batch,
        mixed,
        factors,
        num_tokens,
        x.stride(0),
        gates.stride(0),
        states.conv.stride(0),
    )
    follow(
        (num_parts, metadata.num_reqs),
        x,
        mixed,
        factors,
        *batch,
        states.conv,
        states.recurrent,
        results,
        x.stride(0),
        states.conv.stride(0),
        states.recurrent.stride(0),
    )
    return gated_norm(
        results,
        x[:, heads.num_channels :],
        weights.norm,
        weights.eps,
        rows,
        quantize=quantize,
        group_size=group_size,
        out=out,
    )


def _check(x: torch.Tensor, gates: torch.Tensor, heads: DeltaHeads) -> None:
    check_columns(x=x, gates=gates)
    if x.dtype is not gates.dtype:
        raise ValueError(f"x is {x.dtype}, gates are {gates.dtype}")
    if heads.key_dim not in _DIMS or heads.value_dim not in _DIMS:
        raise UnsupportedTargetError(
            f"key_dim is {heads.key_dim} and value_dim {heads.value_dim}; GPU operations take powers of two from "
            f"{_DIMS[0]} to {_DIMS[-1]}: use --kernels torch"
        )
    if not 2 <= heads.conv_width <= _MAX_CONV_WIDTH:
        raise UnsupportedTargetError(
            f"conv_width is {heads.conv_width}; GPU operations take 2 to {_MAX_CONV_WIDTH}: use --kernels torch"
        )


@cache
def _bind(heads: DeltaHeads) -> tuple[BoundKernel, int, BoundKernel, int]:
    """Returns the kernel of the convolution, its tokens per program, that of the state, and its programs per row."""
    sizes = {
        "NUM_KEY_HEADS": heads.num_key_heads,
        "KEY_DIM": heads.key_dim,
        "NUM_VALUE_HEADS": heads.num_value_heads,
        "VALUE_DIM": heads.value_dim,
        "CONV_WIDTH": heads.conv_width,
    }
    block_c = max(heads.key_dim, heads.value_dim)
    block_t = _VALUES_PER_PROGRAM // block_c
    mix = BoundKernel(
        _mix_kernel,
        **sizes,
        NORM_EPS=NORM_EPS,
        BLOCK_H=triton.next_power_of_2(heads.num_value_heads),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
    )
    num_parts = heads.num_value_heads * (heads.value_dim // _BLOCK_V)
    follow = BoundKernel(
        _follow_kernel,
        **sizes,
        NUM_ADJACENT=heads.num_adjacent,
        BLOCK_V=_BLOCK_V,
        BLOCK_W=triton.next_power_of_2(heads.conv_width - 1),
        BLOCK_C=triton.next_power_of_2(triton.cdiv(heads.num_channels, num_parts)),
        num_warps=1,
    )
    return mix, block_t, follow, num_parts


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """Returns log(1 + exp(x)), with a small relative error also where exp(x) is small against 1."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    rounded = tl.where(total == 1.0, 1.0, total - 1.0)  # the part of `small` that is in the total
    return tl.maximum(x, 0.0) + tl.where(total == 1.0, small, tl.log(total) * (small / rounded))


@triton.jit
def _store_factors(  # type: ignore[no-untyped-def]
    gates_ptr,
    decay_ptr,
    dt_bias_ptr,
    factors_ptr,
    tokens,
    is_token,
    gates_stride,
    NUM_VALUE_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Writes what the tokens multiply states by, and their betas, for all heads."""
    heads = tl.arange(0, BLOCK_H)
    in_layer = heads < NUM_VALUE_HEADS
    mask = is_token[:, None] & in_layer[None, :]
    gate_ptrs = gates_ptr + tokens[:, None] * gates_stride + heads[None, :]
    b = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(gate_ptrs + NUM_VALUE_HEADS, mask=mask, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + heads, mask=in_layer, other=0.0)[None, :]
    dt_bias = tl.load(dt_bias_ptr + heads, mask=in_layer, other=0.0)[None, :]
    factor_ptrs = factors_ptr + tokens[:, None] * (2 * NUM_VALUE_HEADS) + heads[None, :]
    tl.store(factor_ptrs, tl.exp(-decay * _softplus(a + dt_bias)), mask=mask)
    tl.store(factor_ptrs + NUM_VALUE_HEADS, tl.sigmoid(b), mask=mask)


# what the host packs is read one by one, at any alignment within the packed inputs of a step
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "slots_ptr"],
)
def _mix_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gates_ptr,
    conv_ptr,
    decay_ptr,
    dt_bias_ptr,
    conv_states_ptr,
    token_rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slots_ptr,
    mixed_ptr,
    factors_ptr,
    num_tokens,
    x_stride,
    gates_stride,
    conv_states_stride,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    NORM_EPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Processes a head of queries, keys or values of BLOCK_T tokens, or the gates of all heads.

    Writes nothing for tokens of padding.
    """
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    block = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = tl.load(token_rows_ptr + tokens, mask=tokens < num_tokens, other=-1)
    is_token = rows >= 0
    if block < 2 * NUM_KEY_HEADS + NUM_VALUE_HEADS:
        first = tl.load(query_start_loc_ptr + rows, mask=is_token, other=0)
        end = tl.load(query_start_loc_ptr + 1 + rows, mask=is_token, other=0)
        is_continued = tl.load(seq_lens_ptr + rows, mask=is_token, other=0) > end - first
        slots = tl.load(slots_ptr + rows, mask=is_token, other=0).to(tl.int64)
        is_value = block >= 2 * NUM_KEY_HEADS
        width = tl.where(is_value, VALUE_DIM, KEY_DIM)
        first_column = tl.where(is_value, 2 * KEY_SIZE + (block - 2 * NUM_KEY_HEADS) * VALUE_DIM, block * KEY_DIM)
        in_head = tl.arange(0, BLOCK_C)
        columns = (first_column + in_head)[None, :]
        mask = is_token[:, None] & (in_head < width)[None, :]
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(CONV_WIDTH):
            sources = tokens - (CONV_WIDTH - 1 - tap)
            is_new = sources >= first  # otherwise a token of an earlier step
            kept = CONV_WIDTH - 1 + sources - first
            new = tl.load(x_ptr + sources[:, None] * x_stride + columns, mask=mask & is_new[:, None], other=0.0)
            old = tl.load(
                conv_states_ptr + (slots * conv_states_stride + kept * NUM_CHANNELS)[:, None] + columns,
                mask=mask & (is_continued & (sources < first))[:, None],
                other=0.0,
            )
            weight = tl.load(conv_ptr + tap * NUM_CHANNELS + columns, mask=(in_head < width)[None, :], other=0.0)
            total += tl.where(is_new[:, None], new.to(tl.float32), old) * weight
        mixed = total * tl.sigmoid(total)
        if block < 2 * NUM_KEY_HEADS:
            scale = tl.where(block < NUM_KEY_HEADS, KEY_DIM**-0.5, 1.0)
            mixed *= (tl.rsqrt(tl.sum(mixed * mixed, axis=1) + NORM_EPS) * scale)[:, None]
        tl.store(mixed_ptr + tokens[:, None] * NUM_CHANNELS + columns, mixed, mask=mask)
    else:
        _store_factors(
            gates_ptr,
            decay_ptr,
            dt_bias_ptr,
            factors_ptr,
            tokens,
            is_token,
            gates_stride,
            NUM_VALUE_HEADS,
            BLOCK_H,
        )


@triton.jit
def _keep_inputs(  # type: ignore[no-untyped-def]
    x_ptr,
    state_ptr,
    first,
    end,
    is_continued,
    x_stride,
    part,
    CONV_WIDTH: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Keeps the last CONV_WIDTH - 1 inputs of the convolution in BLOCK_C channels of a row."""
    columns = part * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    kept = tl.arange(0, BLOCK_W)[:, None]
    mask = (kept < CONV_WIDTH - 1) & (columns < NUM_CHANNELS)
    sources = end - (CONV_WIDTH - 1) + kept
    is_new = sources >= first
    new = tl.load(x_ptr + sources.to(tl.int64) * x_stride + columns, mask=mask & is_new, other=0.0).to(tl.float32)
    old = tl.load(
        state_ptr + (kept + end - first) * NUM_CHANNELS + columns,
        mask=mask & (sources < first) & is_continued,
        other=0.0,
    )
    tl.debug_barrier()  # all have been read before one is overwritten
    tl.store(state_ptr + kept * NUM_CHANNELS + columns, tl.where(is_new, new, old), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "slots_ptr"])
def _follow_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    mixed_ptr,
    factors_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    slots_ptr,
    conv_states_ptr,
    recurrent_ptr,
    results_ptr,
    x_stride,
    conv_states_stride,
    states_stride,
    NUM_KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    NUM_ADJACENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Updates BLOCK_V columns of the state of a head by the tokens of a row, and writes their results.

    Also keeps the last inputs of a part of the convolution, which has read the former.
    """
    KEY_SIZE: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * KEY_SIZE + NUM_VALUE_HEADS * VALUE_DIM
    part, row = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    if seq_len > 0:
        first, end = tl.load(query_start_loc_ptr + row), tl.load(query_start_loc_ptr + 1 + row)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        is_continued = seq_len > end - first
        head = part // (VALUE_DIM // BLOCK_V)
        keys = tl.arange(0, KEY_DIM)
        columns = part % (VALUE_DIM // BLOCK_V) * BLOCK_V + tl.arange(0, BLOCK_V)
        head_ptr = recurrent_ptr + slot * states_stride + head * (KEY_DIM * VALUE_DIM)
        state_ptrs = head_ptr + keys[:, None] * VALUE_DIM + columns
        state = tl.load(state_ptrs, mask=(keys >= 0)[:, None] & is_continued, other=0.0)
        # a token is loaded while the one before is computed
        token_ptr = mixed_ptr + first.to(tl.int64) * NUM_CHANNELS
        q_ptrs = token_ptr + head // NUM_ADJACENT % NUM_KEY_HEADS * KEY_DIM + keys
        v_ptrs = token_ptr + 2 * KEY_SIZE + head * VALUE_DIM + columns
        result_ptrs = results_ptr + first.to(tl.int64) * (NUM_VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + columns
        factor_ptr = factors_ptr + first.to(tl.int64) * (2 * NUM_VALUE_HEADS) + head
        has_next = first < end
        next_q = tl.load(q_ptrs, mask=has_next, other=0.0)
        next_k = tl.load(q_ptrs + KEY_SIZE, mask=has_next, other=0.0)
        next_v = tl.load(v_ptrs, mask=has_next, other=0.0)
        next_decay = tl.load(factor_ptr, mask=has_next, other=0.0)
        next_beta = tl.load(factor_ptr + NUM_VALUE_HEADS, mask=has_next, other=0.0)
        _keep_inputs(
            x_ptr,
            conv_states_ptr + slot * conv_states_stride,
            first,
            end,
            is_continued,
            x_stride,
            part,
            CONV_WIDTH,
            NUM_CHANNELS,
            BLOCK_W,
            BLOCK_C,
        )
        for token in range(first, end):
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
            q_ptrs += NUM_CHANNELS
            v_ptrs += NUM_CHANNELS
            factor_ptr += 2 * NUM_VALUE_HEADS
            has_next = token + 1 < end
            next_q = tl.load(q_ptrs, mask=has_next, other=0.0)
            next_k = tl.load(q_ptrs + KEY_SIZE, mask=has_next, other=0.0)
            next_v = tl.load(v_ptrs, mask=has_next, other=0.0)
            next_decay = tl.load(factor_ptr, mask=has_next, other=0.0)
            next_beta = tl.load(factor_ptr + NUM_VALUE_HEADS, mask=has_next, other=0.0)
            # two sums of the old state, which do not wait for each other: the new state has S^T q = g S^T q + (q k) c
            by_k, by_q = tl.sum(state * k[:, None], axis=0), tl.sum(state * q[:, None], axis=0)
            change = beta * (v - decay * by_k)
            tl.store(result_ptrs, decay * by_q + tl.sum(q * k, axis=0) * change)
            result_ptrs += NUM_VALUE_HEADS * VALUE_DIM
            state = decay * state + k[:, None] * change[None, :]
        tl.store(state_ptrs, state)
