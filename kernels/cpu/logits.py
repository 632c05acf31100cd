"""One row of logits before sampling: its largest value, penalties, biases and mask, log-probabilities."""

import math
from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.jit import strict_kernel
from kernels.cpu.select import fill_keys, select_key

if TYPE_CHECKING:
    from kernels.cpu.arrays import Doubles, Floats, Ints, Longs

_INF_ORDER = np.int32(0x7F800000)
_NEG_INF_ORDER = np.int32(-0x7F800001)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_BLOCK = 512
"""Values that are compared together."""


@strict_kernel
def largest(values: "Floats") -> tuple[np.float32, bool]:
    """Returns the largest value, and whether all values are valid: neither NaN nor +inf.

    Compares float bits as integers of the same order, with NaN beyond the infinities. Integer maxima are vectorised,
    maxima of floats that may be NaN are not (150,000 values: 6 µs against 68 µs).
    """
    bits = values.view(np.int32)
    high = _NEG_INF_ORDER
    low = _INF_ORDER
    for i in range(len(bits)):
        order = bits[i] ^ ((bits[i] >> 31) & _MAGNITUDE)
        high = max(high, order)
        low = min(low, order)
    result = np.empty(1, dtype=np.int32)
    result[0] = high ^ ((high >> 31) & _MAGNITUDE)
    return result.view(np.float32)[0], bool(high < _INF_ORDER and low >= _NEG_INF_ORDER)


@strict_kernel
def index_of(value: np.float32, values: "Floats") -> int:
    """Returns the first index of a value that is there.

    Skips blocks without it, because only a loop without an early end is vectorised (150,000 values: 7 µs against 50).
    """
    start = 0
    while True:
        block = values[start : start + _BLOCK]
        num_equal = np.int32(0)
        for i in range(len(block)):
            num_equal += np.int32(1) if block[i] == value else np.int32(0)
        if num_equal > 0:
            break
        start += _BLOCK
    while values[start] != value:
        start += 1
    return start


@strict_kernel
def adjusted(
    raw: "Floats",
    tokens: "Ints",
    num_prompt_tokens: int,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    bias_ids: "Ints",
    bias_values: "Floats",
) -> "Floats":
    """Applies penalties and biases (step 1 of `kernels.sampling`) to a copy.

    Args:
        raw: [vocab_size].
        tokens: prompt and output, the first num_prompt_tokens of them prompt.
        num_prompt_tokens, repetition_penalty, presence_penalty, frequency_penalty: as in `SamplingBatch`.
        bias_ids, bias_values: of this row.
    """
    sums = raw.astype(np.float64)
    if repetition_penalty != 1.0 or presence_penalty != 0.0 or frequency_penalty != 0.0:
        seen = np.zeros(len(raw), dtype=np.bool_)
        for token_id in tokens:
            if not seen[token_id]:
                seen[token_id] = True
                value = sums[token_id]
                sums[token_id] = value / repetition_penalty if value > 0.0 else value * repetition_penalty
        counts = np.zeros(len(raw), dtype=np.int32)
        for token_id in tokens[num_prompt_tokens:]:
            counts[token_id] += 1
        for token_id in tokens[num_prompt_tokens:]:
            if counts[token_id] > 0:
                sums[token_id] -= frequency_penalty * counts[token_id]
                sums[token_id] -= presence_penalty
                counts[token_id] = 0
    for i in range(len(bias_ids)):
        sums[bias_ids[i]] += np.float64(bias_values[i])
    return sums.astype(np.float32)


@strict_kernel
def masked(values: "Floats", words: "Ints") -> "Floats":
    """Applies the mask (end of step 1): returns a copy with -inf for every token whose bit is clear.

    Args:
        values: [vocab_size].
        words: [>= ceil(vocab_size / 32)].
    """
    forbidden = np.float32(-np.inf)
    result = np.empty(len(values), dtype=np.float32)
    num_whole = len(values) // 32
    for index in range(num_whole):
        word, start = words[index], 32 * index
        for i in range(32):  # without a branch: vectorised
            result[start + i] = values[start + i] if (word >> np.int32(i)) & np.int32(1) else forbidden
    for i in range(32 * num_whole, len(values)):
        result[i] = values[i] if (words[num_whole] >> np.int32(i & 31)) & np.int32(1) else forbidden
    return result


@strict_kernel
def log_sum_exp(raw: "Floats", top: np.float32) -> float:
    """Returns log(sum(exp(raw))) with top = max(raw) finite, summed in fp64 in order."""
    total = 0.0
    for value in raw:
        total += math.exp(np.float64(value) - np.float64(top))
    return np.float64(top) + math.log(total)


@strict_kernel
def write_top(raw: "Floats", num_top: int, log_sum: float, top_ids: "Longs", top_values: "Doubles") -> None:
    """Writes the most probable tokens, best first, equal ones by lowest id.

    Args:
        raw: [vocab_size].
        num_top: how many, at most vocab_size.
        log_sum: see `log_sum_exp`.
        top_ids, top_values: [>= num_top], written.
    """
    if num_top == 0:
        return
    keys = np.empty(len(raw), dtype=np.uint32)
    fill_keys(raw, keys)
    key, above = select_key(keys, None, np.float64(num_top))
    num_equal = num_top - int(above)
    num_found = 0
    for token_id in range(len(raw)):
        if keys[token_id] < key:
            continue
        if keys[token_id] == key:
            if num_equal == 0:
                continue
            num_equal -= 1
        place = num_found
        while place > 0 and raw[top_ids[place - 1]] < raw[token_id]:
            top_ids[place] = top_ids[place - 1]
            place -= 1
        top_ids[place] = token_id
        num_found += 1
    for i in range(num_top):
        top_values[i] = np.float64(raw[top_ids[i]]) - log_sum
