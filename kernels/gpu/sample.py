"""Sampling on a GPU by the rules of `kernels.sampling`, without a sort of the vocabulary and without the host.

    adjust       penalties, biases and masks, into a copy of the rows that have any
    scan         reads all logits once: the largest of every 16 to 128, the probability mass of larger pieces
    plan_rows    from the scan: failures, greedy and forced tokens, and one of three ways for each other row
    candidates, draw_candidates    rows with top_k or top_p: the few tokens that can matter, one program a row
    draw_all     rows without, and those that few candidates do not decide
    logprobs     of raw logits

The bits of a row's result do not depend on the other rows or on the number of programs that share it: logits are
divided into tiles and chunks by token id alone, each is reduced by one program in one order, and reductions without a
fixed order are done in integers. The kernels and their numbers of programs depend on shapes and on the batch's host
numbers, so that a call can be captured in a CUDA graph; a row that a kernel does not apply to costs it one load.

Differences from the CPU: a score may differ in the last bits of its logarithms, and nucleus masses by about 1e-7 of the
whole where a row is not decided by its candidates. `kernels.gpu.gumbel` derives how often a draw differs.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from kernels.gpu.adjust import adjust_logits
from kernels.gpu.candidates import gather_candidates
from kernels.gpu.draw_all import draw_all
from kernels.gpu.draw_candidates import draw_candidates
from kernels.gpu.launch import is_compile_only
from kernels.gpu.logprobs import write_logprobs
from kernels.gpu.plan_rows import plan_rows
from kernels.gpu.sampling_tiles import MAX_VOCAB_SIZE, sampling_tile
from kernels.gpu.scan import scan_rows
from kernels.gpu.targets import Target, UnsupportedTargetError
from kernels.sampling import SampledTokens, SamplingBatch, TokenMasks


def sample(logits: torch.Tensor, batch: SamplingBatch, *, target: Target, num_processors: int) -> SampledTokens:
    """Draws one token per row by the rules of `kernels.sampling`, all on the device.

    Memory while it runs: vocab_size * 4 bytes per row if the batch has penalties, biases or masks, and about 60 KB per
    row.

    Args:
        logits: [S, vocab_size], float32, contiguous, not changed.
        batch: sampling parameters of each row, on the device of the logits.
        target: the GPU.
        num_processors: its multiprocessors.

    Raises:
        ValueError: logits of another shape, dtype or layout.
        UnsupportedTargetError: a vocabulary beyond MAX_VOCAB_SIZE.
    """
    if logits.ndim != 2 or logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"logits are {logits.dtype} of shape {list(logits.shape)}, strides {logits.stride()}; expected whole rows "
            "in float32"
        )
    if not 1 <= logits.shape[1] <= MAX_VOCAB_SIZE:
        raise UnsupportedTargetError(
            f"a vocabulary of {logits.shape[1]} tokens; the sampler of a GPU takes 1 to {MAX_VOCAB_SIZE}: use "
            "--kernels torch"
        )
    if is_compile_only():
        for form in _every_form(batch):
            _sample(logits, form, target, num_processors)
    return _sample(logits, batch, target, num_processors)


def _every_form(batch: SamplingBatch) -> Iterator[SamplingBatch]:
    """Yields batches that together launch every kernel in every specialization."""
    ids, bias_values = batch.bias_ids.new_empty(1), batch.bias_values.new_empty(1)
    masks = TokenMasks(batch.top_k, batch.top_k.new_empty(1, 1))
    everything = replace(
        batch, any_penalised=True, any_random=True, any_filtered=True, max_top_logprobs=1, bias_ids=ids,
        bias_values=bias_values, masks=masks, forced_ids=batch.top_k,
    )  # fmt: skip
    adjusts_less = replace(everything, masks=None)
    for form in (everything, adjusts_less, replace(adjusts_less, any_penalised=False, bias_ids=ids[:0])):
        for unforced in (form, replace(form, forced_ids=None)):
            yield unforced
            yield replace(unforced, any_random=False)


def _sample(logits: torch.Tensor, batch: SamplingBatch, target: Target, num_processors: int) -> SampledTokens:
    num_rows, vocab_size = logits.shape
    tile = sampling_tile(vocab_size, target, num_processors)
    result = _empty_result(num_rows, max(0, batch.max_top_logprobs), logits.device)
    rows = adjust_logits(logits, batch, tile=tile)
    plans = plan_rows(rows, scan_rows(rows, batch, tile=tile), batch, result, tile=tile)
    if batch.any_random:
        if batch.any_filtered:
            candidates = gather_candidates(rows, plans, tile=tile)
            draw_candidates(plans, candidates, batch, result, vocab_size, tile=tile)
        draw_all(rows, plans, batch, result, tile=tile)
    if batch.max_top_logprobs >= 0:
        write_logprobs(logits, batch, result, tile=tile)
    return result


def _empty_result(num_rows: int, width: int, device: torch.device) -> SampledTokens:
    return SampledTokens(
        token_ids=torch.empty(num_rows, dtype=torch.int64, device=device),
        status=torch.empty(num_rows, dtype=torch.int8, device=device),
        logprobs=torch.full((num_rows,), math.nan, dtype=torch.float64, device=device),
        top_ids=torch.full((num_rows, width), -1, dtype=torch.int64, device=device),
        top_values=torch.full((num_rows, width), math.nan, dtype=torch.float64, device=device),
    )
