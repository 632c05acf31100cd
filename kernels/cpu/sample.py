"""Sampling on CPUs by the rules of `kernels.sampling`: rows in parallel, no sort of the vocabulary.

Each row is computed by one thread in a fixed order, so its result depends neither on the other rows nor on the number
of threads.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import prange

import kernels.cpu.threads  # noqa: F401 - chooses numba's threading layer
from kernels.cpu.gumbel import draw_from, draw_from_all
from kernels.cpu.jit import compile_for, strict_kernel, strict_parallel_kernel
from kernels.cpu.logits import adjusted, index_of, largest, log_sum_exp, masked, write_top
from kernels.cpu.select import fill_keys, select_key
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch, greedy_batch

if TYPE_CHECKING:
    from kernels.cpu.arrays import Bytes, Doubles, Floats, Ints, Longs, Words

_SMALL, _SMALL_RANDOM = 1 << 21, 1 << 19
"""Logits of which one thread can draw tokens in the time that it takes to wake the others: greedily, and at random."""

_NO_INTS = np.zeros(0, dtype=np.int32)
_NO_MASKS = np.zeros((0, 0), dtype=np.int32)

_BAD_LOGITS, _NO_CANDIDATE = int(RowStatus.BAD_LOGITS), int(RowStatus.NO_CANDIDATE)


class _Columns(NamedTuple):
    """The arrays of a `SamplingBatch` for numba; the last three are empty where the batch has none."""

    temperature: "Doubles"
    top_p: "Doubles"
    min_p: "Doubles"
    repetition_penalty: "Doubles"
    presence_penalty: "Doubles"
    frequency_penalty: "Doubles"
    top_k: "Ints"
    seed: "Longs"
    position: "Longs"
    top_logprobs: "Ints"
    history: "Ints"
    history_row: "Ints"
    num_prompt_tokens: "Ints"
    num_tokens: "Ints"
    bias_start: "Ints"
    bias_ids: "Ints"
    bias_values: "Floats"
    mask_rows: "Ints"
    mask_words: "Ints"
    forced_ids: "Ints"


class _Results(NamedTuple):
    """The arrays of `SampledTokens` for numba."""

    token_ids: "Longs"
    status: "Bytes"
    logprobs: "Doubles"
    top_ids: "Longs"
    top_values: "Doubles"


class Sampler:
    """Draws one token per row by the rules of `kernels.sampling`. One thread may use it at a time."""

    def __init__(self) -> None:
        """Draws nothing yet; compiles nothing."""
        self._last: tuple[SamplingBatch, _Columns] | None = None  # consecutive steps mostly have the same batch

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, show: "Callable[[Longs], None]" = lambda _: None
    ) -> SampledTokens:
        """Draws.

        Args:
            logits: [S, vocab_size], float32, contiguous, not changed.
            batch: sampling parameters of each row.
            show: called with the array of token ids before the first draw; entries are -1 until drawn.
        Raises: ValueError: logits of another dtype or layout, for which a kernel would be compiled now.
        """
        if logits.ndim != 2 or logits.dtype is not torch.float32 or not logits.is_contiguous():
            raise ValueError(
                f"logits are {logits.dtype} of shape {list(logits.shape)}, strides {logits.stride()}; expected whole "
                "rows in float32"
            )
        num_rows = logits.shape[0]
        is_small = num_rows == 1 or logits.numel() < (_SMALL_RANDOM if batch.any_random else _SMALL)
        if self._last is None or self._last[0] is not batch:
            self._last = batch, _columns(batch)
        sampled = SampledTokens.undecided(num_rows, batch.max_top_logprobs)
        results = _results(sampled)
        show(results.token_ids)
        kernel = _sample_rows if is_small else _sample_rows_on_all_threads
        kernel(logits.numpy(), self._last[1], results)
        return sampled


def compile_sampler() -> None:
    """Compiles both kernels, or loads them from the disk, before the first request."""
    batch = greedy_batch(1)
    results = _results(SampledTokens.undecided(1, batch.max_top_logprobs))
    for kernel in (_sample_rows, _sample_rows_on_all_threads):
        compile_for(kernel, torch.zeros(1, 1).numpy(), _columns(batch), results)


def _results(sampled: SampledTokens) -> _Results:
    return _Results(*(getattr(sampled, name).numpy() for name in _Results._fields))


def _columns(batch: SamplingBatch) -> _Columns:
    """Returns the same types with and without masks, so that each kernel is compiled once."""
    arrays = [getattr(batch, name).numpy() for name in _Columns._fields[:-3]]
    masks, forced_ids = batch.masks, batch.forced_ids
    arrays += (
        _NO_INTS if masks is None else masks.rows.numpy(),
        _NO_MASKS if masks is None else np.ascontiguousarray(masks.words.numpy()),
        _NO_INTS if forced_ids is None else forced_ids.numpy(),
    )
    return _Columns._make(arrays)


@strict_parallel_kernel
def _sample_rows_on_all_threads(logits: "Floats", columns: _Columns, results: _Results) -> None:
    for i in prange(len(logits)):
        _sample_row(np.int64(i), logits, columns, results)


@strict_kernel
def _sample_rows(logits: "Floats", columns: _Columns, results: _Results) -> None:
    for i in range(len(logits)):
        _sample_row(np.int64(i), logits, columns, results)


@strict_kernel
def _sample_row(i: np.int64, logits: "Floats", columns: _Columns, results: _Results) -> None:
    raw = logits[i]
    raw_top, is_proper = largest(raw)
    values, top = raw, raw_top
    start, stop = columns.bias_start[i], columns.bias_start[i + 1]
    repetition, presence = columns.repetition_penalty[i], columns.presence_penalty[i]
    frequency = columns.frequency_penalty[i]
    if is_proper and (start < stop or repetition != 1.0 or presence != 0.0 or frequency != 0.0):
        values = adjusted(
            raw,
            columns.history[columns.history_row[i], : columns.num_tokens[i]],
            columns.num_prompt_tokens[i],
            repetition,
            presence,
            frequency,
            columns.bias_ids[start:stop],
            columns.bias_values[start:stop],
        )
        top, is_proper = largest(values)
    if is_proper and len(columns.mask_rows) > 0 and columns.mask_rows[i] >= 0:
        values = masked(values, columns.mask_words[columns.mask_rows[i]])
        top = largest(values)[0]
    if not is_proper:
        results.status[i] = _BAD_LOGITS
    elif top == -np.inf:
        results.status[i] = _NO_CANDIDATE
    else:
        if len(columns.forced_ids) > 0 and columns.forced_ids[i] >= 0:
            token_id = np.int64(columns.forced_ids[i])
        else:
            token_id = np.int64(_token(values, top, columns, i))
        results.token_ids[i] = token_id
        num_top = columns.top_logprobs[i]
        if num_top >= 0:
            log_sum = log_sum_exp(raw, raw_top)
            results.logprobs[i] = np.float64(raw[token_id]) - log_sum
            write_top(raw, min(num_top, len(raw)), log_sum, results.top_ids[i], results.top_values[i])


@strict_kernel
def _token(values: "Floats", top: np.float32, columns: _Columns, i: np.int64) -> int:
    """Performs steps 2 to 4: draws the token of row i from logits with a finite largest value."""
    top_id = index_of(top, values)
    temperature = columns.temperature[i]
    if temperature == 0.0:
        return top_id
    top_k, top_p, min_p = int(columns.top_k[i]), columns.top_p[i], columns.min_p[i]
    if top_k >= len(values):
        top_k = 0
    seed, position = np.uint64(columns.seed[i]), columns.position[i]
    if top_k == 0 and top_p >= 1.0 and min_p <= 0.0:
        return draw_from_all(values, top_id, temperature, seed, position)
    ids, d = _kept_tokens(values, top, temperature, top_k, top_p, min_p)
    return draw_from(ids, d, seed, position)


@strict_kernel
def _kept_tokens(
    values: "Floats", top: np.float32, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple["Ints", "Doubles"]:
    """Performs step 3: returns the ids of the tokens that may be drawn, ascending, and their d."""
    keys = np.empty(len(values), dtype=np.uint32)
    fill_keys(values, keys)
    cut_key, num_equal = np.uint32(0), 0
    if top_k > 0:
        cut_key, above = select_key(keys, None, np.float64(top_k))
        num_equal = top_k - int(above)
    least_d = math.log(min_p) if min_p > 0.0 else -np.inf
    ids = np.empty(top_k if top_k > 0 else len(values), dtype=np.int32)
    d = np.empty(len(ids))
    num_kept = 0
    for token_id in range(len(values)):
        key = keys[token_id]
        if key < cut_key or values[token_id] == -np.inf:
            continue
        if key == cut_key:  # equal logits: lowest ids first
            if num_equal == 0:
                continue
            num_equal -= 1
        distance = (np.float64(values[token_id]) - np.float64(top)) / temperature
        if distance >= least_d:
            ids[num_kept], d[num_kept], keys[num_kept] = token_id, distance, key
            num_kept += 1
    if top_p >= 1.0:
        return ids[:num_kept], d[:num_kept]
    return _head_of_mass(keys[:num_kept], ids[:num_kept], d[:num_kept], top_p)


@strict_kernel
def _head_of_mass(keys: "Words", ids: "Ints", d: "Doubles", top_p: float) -> tuple["Ints", "Doubles"]:
    """Keeps the smallest set of most probable tokens whose share of the probability reaches top_p.

    Args:
        keys, ids, d: of the tokens, ascending by id; the last two are compacted in place.
        top_p: below 1.
    """
    weights = np.empty(len(d))
    total = 0.0
    for i in range(len(d)):
        weights[i] = math.exp(d[i])
        total += weights[i]
    target = top_p * total
    cut_key, mass = select_key(keys, weights, target)
    num_kept = 0
    for i in range(len(ids)):
        if keys[i] < cut_key:
            continue
        if keys[i] == cut_key:
            if mass >= target:
                continue
            mass += weights[i]
        ids[num_kept], d[num_kept] = ids[i], d[i]
        num_kept += 1
    return ids[:num_kept], d[:num_kept]
