"""Penalties, biases and masks, applied to a copy of the rows that have any.

The work is proportional to the number of penalties and biases. Masks come last and are read whole.

The copy itself records which tokens were seen: each token of the history is first marked there by a signalling NaN,
which arithmetic never produces and whose payload counts the output tokens. The raw logits stay unchanged, so the new
value of a marked token follows from its mark and raw logit. Programs that process the same token concurrently write the
same value; later ones find no mark. Tokens with a bias are processed first, so that each sum is rounded once.
"""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.gpu.sampling_tiles import SamplingTile
from kernels.gpu.scan import Logits, unadjusted
from kernels.gpu.token_order import INF
from kernels.sampling import SamplingBatch, TokenMasks

_SEEN = tl.constexpr(0x7F800001)
_MOST_SEEN = tl.constexpr(0x7FBFFFFF)

_HISTORY_BLOCK = 1024
"""Tokens of the history that a program handles at a time."""

_BIAS_BLOCK = 32
"""Biases of a row that are compared with each other at a time, to add up those of the same token."""


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch, *, tile: SamplingTile) -> Logits:
    """Performs step 1 of `kernels.sampling`: applies penalties, biases and masks to a copy of the rows that have any.

    Needs vocab_size * 4 bytes for each of S rows.

    Args:
        logits: [S, vocab_size] float32.
        batch: sampling parameters.
        tile: sizes.
    """
    any_biased = batch.bias_ids.numel() > 0
    if not batch.any_penalised and not any_biased and batch.masks is None:
        return unadjusted(logits)
    num_rows, vocab_size = logits.shape
    copy = torch.empty_like(logits)
    marks = copy.view(torch.int32)
    is_adjusted = torch.empty(num_rows, dtype=torch.int8, device=logits.device)
    penalties = (batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty)
    history = (batch.history, batch.history_row, batch.num_prompt_tokens, batch.num_tokens)
    num_chunks = triton.cdiv(vocab_size, tile.chunk)
    launch(
        _copy_rows_kernel,
        tile.shared_rows(num_rows, num_chunks),
        logits,
        copy,
        is_adjusted,
        *penalties,
        batch.bias_start,
        batch.bias_start if batch.masks is None else batch.masks.rows,
        vocab_size,
        num_chunks,
        HAS_MASKS=batch.masks is not None,
        CHUNK=tile.chunk,
        num_warps=tile.scan_warps,
    )
    max_len, row_stride = batch.history.shape[1], batch.history.stride(0)
    grid = tile.shared_rows(num_rows, triton.cdiv(max_len, _HISTORY_BLOCK))

    def read_history(step: str) -> None:
        launch(
            _read_history_kernel,
            grid,
            logits,
            copy,
            marks,
            *penalties,
            *history,
            vocab_size,
            row_stride,
            STEP=step,
            BLOCK=_HISTORY_BLOCK,
            num_warps=tile.scan_warps,
        )

    if batch.any_penalised:
        read_history("mark")
        read_history("count")
    if any_biased:
        launch(
            _add_biases_kernel,
            (num_rows,),
            logits,
            copy,
            marks,
            *penalties,
            batch.bias_start,
            batch.bias_ids,
            batch.bias_values,
            vocab_size,
            BLOCK=_BIAS_BLOCK,
            num_warps=tile.scan_warps,
        )
    if batch.any_penalised:
        read_history("apply")
    if batch.masks is not None:
        _mask_rows(copy, batch.masks, tile=tile)
    return Logits(logits, copy, is_adjusted, any_adjusted=True)


def _mask_rows(logits: torch.Tensor, masks: TokenMasks, *, tile: SamplingTile) -> None:
    """Sets the forbidden logits of rows with a mask to -inf; NaN and +inf stay, so that the row still fails."""
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, tile.chunk)
    launch(
        _mask_rows_kernel,
        tile.shared_rows(num_rows, num_chunks),
        logits,
        masks.rows,
        masks.words,
        vocab_size,
        masks.words.stride(0),
        num_chunks,
        CHUNK=tile.chunk,
        num_warps=tile.scan_warps,
    )


@triton.jit
def _is_penalised(row, repetition_ptr, presence_ptr, frequency_ptr):  # type: ignore[no-untyped-def]
    has_repetition = tl.load(repetition_ptr + row) != 1.0
    return has_repetition | (tl.load(presence_ptr + row) != 0.0) | (tl.load(frequency_ptr + row) != 0.0)


@triton.jit(
    do_not_specialize=[
        "repetition_ptr", "presence_ptr", "frequency_ptr", "bias_start_ptr", "mask_rows_ptr", "num_chunks"
    ]
)  # fmt: skip
def _copy_rows_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    copy_ptr,
    is_adjusted_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_start_ptr,
    mask_rows_ptr,
    vocab_size,
    num_chunks,
    HAS_MASKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    has_bias = tl.load(bias_start_ptr + row) < tl.load(bias_start_ptr + row + 1)
    is_adjusted = has_bias | _is_penalised(row, repetition_ptr, presence_ptr, frequency_ptr)
    if HAS_MASKS:
        is_adjusted |= tl.load(mask_rows_ptr + row) >= 0
    if tl.program_id(1) == 0:
        tl.store(is_adjusted_ptr + row, is_adjusted.to(tl.int8))
    if is_adjusted:
        offset = row.to(tl.int64) * vocab_size
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            logits = tl.load(raw_ptr + offset + ids, mask=ids < vocab_size)
            tl.store(copy_ptr + offset + ids, logits, mask=ids < vocab_size)


@triton.jit
def _penalised(raw, marks, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    """Returns logits in fp64 after the penalties of tokens with these marks; others are unchanged."""
    is_seen = (marks >= _SEEN) & (marks <= _MOST_SEEN)
    count = tl.where(is_seen, marks - _SEEN, 0)
    value = raw.to(tl.float64)
    seen_value = tl.where(value > 0.0, value / repetition, value * repetition)
    value = tl.where(is_seen, seen_value, value)
    value = tl.where(count > 0, value - frequency * count.to(tl.float64), value)
    return tl.where(count > 0, value - presence, value)


@triton.jit(
    do_not_specialize=[
        "repetition_ptr", "presence_ptr", "frequency_ptr", "history_ptr", "history_row_ptr", "num_prompt_tokens_ptr",
        "num_tokens_ptr", "row_stride",
    ]
)  # fmt: skip
def _read_history_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    copy_ptr,
    marks_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    history_ptr,
    history_row_ptr,
    num_prompt_tokens_ptr,
    num_tokens_ptr,
    vocab_size,
    row_stride,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if _is_penalised(row, repetition_ptr, presence_ptr, frequency_ptr):
        raw_ptr += row.to(tl.int64) * vocab_size
        copy_ptr += row.to(tl.int64) * vocab_size
        marks_ptr += row.to(tl.int64) * vocab_size
        history_ptr += tl.load(history_row_ptr + row).to(tl.int64) * row_stride
        num_tokens = tl.load(num_tokens_ptr + row)
        first = 0
        if STEP == "count":
            first = tl.load(num_prompt_tokens_ptr + row)
        for start in range(first + tl.program_id(1) * BLOCK, num_tokens, tl.num_programs(1) * BLOCK):
            positions = start + tl.arange(0, BLOCK)
            is_token = positions < num_tokens
            ids = tl.load(history_ptr + positions, mask=is_token, other=0)
            if STEP == "mark":
                tl.store(marks_ptr + ids, tl.full([BLOCK], _SEEN, tl.int32), mask=is_token)
            elif STEP == "count":
                tl.atomic_add(marks_ptr + ids, 1, mask=is_token)
            else:
                repetition = tl.load(repetition_ptr + row)
                presence = tl.load(presence_ptr + row)
                frequency = tl.load(frequency_ptr + row)
                marks = tl.load(marks_ptr + ids, mask=is_token, other=0)
                raw = tl.load(raw_ptr + ids, mask=is_token, other=0.0)
                value = _penalised(raw, marks, repetition, presence, frequency).to(tl.float32)
                tl.store(copy_ptr + ids, value, mask=is_token & (marks >= _SEEN) & (marks <= _MOST_SEEN))


@triton.jit(
    do_not_specialize=[
        "repetition_ptr", "presence_ptr", "frequency_ptr", "bias_start_ptr", "bias_ids_ptr", "bias_values_ptr"
    ]
)  # fmt: skip
def _add_biases_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    copy_ptr,
    marks_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_start_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    offset = row.to(tl.int64) * vocab_size
    begin = tl.load(bias_start_ptr + row)
    end = tl.load(bias_start_ptr + row + 1)
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    for start in range(begin, end, BLOCK):
        entries = start + tl.arange(0, BLOCK)
        is_entry = entries < end
        ids = tl.load(bias_ids_ptr + entries, mask=is_entry, other=-1)
        sums = tl.zeros([BLOCK], tl.float64)
        num_earlier = tl.zeros([BLOCK], tl.int32)
        for other_start in range(begin, end, BLOCK):
            others = other_start + tl.arange(0, BLOCK)
            other_ids = tl.load(bias_ids_ptr + others, mask=others < end, other=-2)
            values = tl.load(bias_values_ptr + others, mask=others < end, other=0.0).to(tl.float64)
            is_same = ids[:, None] == other_ids[None, :]
            sums += tl.sum(tl.where(is_same, values[None, :], 0.0), axis=1)
            num_earlier += tl.sum((is_same & (others[None, :] < entries[:, None])).to(tl.int32), axis=1)
        is_first = is_entry & (num_earlier == 0)  # of those with this id
        marks = tl.load(marks_ptr + offset + ids, mask=is_first, other=0)
        raw = tl.load(raw_ptr + offset + ids, mask=is_first, other=0.0)
        value = (_penalised(raw, marks, repetition, presence, frequency) + sums).to(tl.float32)
        tl.store(copy_ptr + offset + ids, value, mask=is_first)


@triton.jit(
    do_not_specialize=["mask_rows_ptr", "words_ptr", "mask_stride", "num_chunks"]
)  # fmt: skip
def _mask_rows_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, mask_rows_ptr, words_ptr, vocab_size, mask_stride, num_chunks, CHUNK: tl.constexpr
):
    row = tl.program_id(0)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row >= 0:
        logits_ptr += row.to(tl.int64) * vocab_size
        words_ptr += mask_row.to(tl.int64) * mask_stride
        for chunk in range(tl.program_id(1), num_chunks, tl.num_programs(1)):
            words = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
            bits = tl.arange(0, 32)[None, :]
            ids = words[:, None] * 32 + bits
            word = tl.load(words_ptr + words, mask=words * 32 < vocab_size, other=0)
            is_forbidden = (ids < vocab_size) & (((word[:, None] >> bits) & 1) == 0)
            logits = tl.load(logits_ptr + ids, mask=is_forbidden, other=0.0)
            tl.store(logits_ptr + ids, -INF, mask=is_forbidden & (logits < INF))
