"""Cutting, slowing and scaling a trace. Each step returns a new trace and keeps the count of its rows.

There is no thinning. A random tenth of Mooncake's conversations keeps 11 of their 37 % of prefix reuse, a fifth of
Azure's code trace half of its burstiness: cut a contiguous window and slow its clock instead. Slowing and speeding up
stretch bursts with everything else, so quote the rate and the index of dispersion of the schedule that was run.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import OptionError
from loadgen.trace.formats import MAX_TOKENS
from loadgen.trace.schema import Blocks, Trace

Overlong = Literal["drop", "clip", "fail"]

_QUANTISED_SHARE = 0.1
"""A clock whose readings repeat this often, at regular steps, ticks. Azure 2023 repeats none, Mooncake 90 and 94 %."""

MAX_SPAN_S = 1e9
"""Longest schedule: thirty years."""


def cut(trace: Trace, from_s: float, to_s: float) -> Trace:
    """The requests that arrive in [from_s, to_s) on the trace's clock.

    Raises: OptionError: the window is empty or holds no request.
    """
    if not from_s < to_s:
        raise OptionError(f"--window {from_s:g}:{to_s:g} ends before it begins")
    low, high = np.searchsorted(trace.arrival_s, [from_s, to_s])
    if low == high:
        raise OptionError(
            f"--window {from_s:g}:{to_s:g} holds none of the requests; they arrive from {trace.arrival_s[0]:g} s to "
            f"{trace.arrival_s[-1]:g} s"
        )
    return trace.take(np.arange(low, high), f"outside the window {from_s:g}:{to_s:g} s")


def limit(trace: Trace, count: int) -> Trace:
    """The first `count` requests, or all if there are fewer.

    Raises: OptionError: count is below 1.
    """
    if count < 1:
        raise OptionError(f"--limit is {count} requests, must be at least 1")
    return trace.take(np.arange(min(count, len(trace))), f"after the first {count}")


def at_speed(trace: Trace, speed: float) -> Trace:
    """The same requests `speed` times faster: at 2, ten minutes are run in five.

    Raises: OptionError: speed is not above 0 and finite, or so low that it takes thirty years.
    """
    if not (speed > 0 and np.isfinite(speed)):
        raise OptionError(f"--speed is {speed:g}, must be above 0: 2 runs ten minutes in five, 0.5 in twenty")
    if not trace.span_s / speed < MAX_SPAN_S:
        raise OptionError(f"--speed {speed:g} makes {trace.span_s:g} s last more than {MAX_SPAN_S:g} s")
    return replace(trace, arrival_s=trace.arrival_s / speed, speed=trace.speed * speed)


def at_rate(trace: Trace, rate: float) -> Trace:
    """Returns the same requests with a mean rate of `rate` per second. The shape of the schedule stays.

    Raises: OptionError: rate is not above 0 and finite, or so low that it takes thirty years; or all requests arrive at
        once.
    """
    if not (rate > 0 and np.isfinite(rate)):
        raise OptionError(f"rate is {rate:g} requests per second, must be above 0 and finite")
    if trace.span_s == 0:
        which = "there is only one request" if len(trace) == 1 else f"all {len(trace)} requests arrive at once"
        raise OptionError(f"a rate of {rate:g} requests/s cannot be reached by scaling time: {which}")
    if not len(trace) / rate < MAX_SPAN_S:
        raise OptionError(f"a rate of {rate:g} requests/s makes {len(trace)} requests last more than {MAX_SPAN_S:g} s")
    return at_speed(trace, rate * trace.span_s / len(trace))


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Prompts and answers `factor` times as long, at least one token, with the same shared prefixes.

    Blocks keep their ids and get `factor` times the tokens; a partly filled last block stays at least a token, so every
    prompt keeps its number of blocks.

    Raises: OptionError: factor is not above 0, or makes a block of no whole number of tokens (off by more than 1 %; the
        text names factors near it that fit), or lengths beyond all bounds.
    """
    if not (factor > 0 and np.isfinite(factor)):
        raise OptionError(f"--length-scale is {factor:g}, must be above 0 and finite")
    longest = max(int(trace.input_tokens.max()), int(trace.output_tokens.max()))
    if longest * factor > MAX_TOKENS:
        raise OptionError(f"--length-scale {factor:g} makes {longest} tokens more than {MAX_TOKENS}")
    output_tokens = np.maximum(np.rint(trace.output_tokens * factor).astype(np.int64), 1)
    if trace.blocks is None:
        input_tokens = np.maximum(np.rint(trace.input_tokens * factor).astype(np.int64), 1)
        return replace(trace, input_tokens=input_tokens, output_tokens=output_tokens)
    old = trace.blocks.block_tokens
    new = _scaled_block(old, factor)
    whole = (trace.input_tokens - 1) // old
    last = trace.input_tokens - whole * old  # 1 to old
    scaled_last = np.clip(np.rint(last * (new / old)).astype(np.int64), 1, new)
    blocks = replace(trace.blocks, block_tokens=new)
    return replace(trace, input_tokens=whole * new + scaled_last, output_tokens=output_tokens, blocks=blocks)


def fit(trace: Trace, max_model_len: int, overlong: Overlong = "drop") -> Trace:
    """Every request fits a context of `max_model_len` tokens, prompt and answer together.

    Args:
        trace: what to fit.
        max_model_len: tokens, at least 2.
        overlong: leave longer ones out; clip them (the answer to all but one token, then the prompt from its end to
            what the answer leaves); or fail.
    Raises: OptionError: max_model_len is below 2, nothing fits, or something does not and shall fail.
    """
    if max_model_len < 2:
        raise OptionError(f"--max-model-len is {max_model_len} tokens, must be at least 2: a prompt and an answer")
    total = trace.input_tokens + trace.output_tokens
    too_long = total > max_model_len
    count = int(too_long.sum())
    if count == 0:
        return trace
    if overlong == "fail":
        raise OptionError(
            f"{count} of {len(trace)} requests need more than --max-model-len {max_model_len}, up to {total.max()} "
            f"(row {trace.rows[total.argmax()]}); leave them out or clip them with --overlong drop or clip"
        )
    if overlong == "drop":
        if count == len(trace):
            raise OptionError(
                f"none of the {count} requests fits --max-model-len {max_model_len}; the shortest needs {total.min()} "
                "tokens"
            )
        return trace.take(np.flatnonzero(~too_long), f"longer than {max_model_len} tokens")
    output_tokens = np.minimum(trace.output_tokens, max_model_len - 1)
    input_tokens = np.minimum(trace.input_tokens, max_model_len - output_tokens)
    return replace(
        trace,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        blocks=None if trace.blocks is None else _covering(trace.blocks, input_tokens),
        accounting=trace.accounting.alter(f"clipped to {max_model_len} tokens", count),
    )


def tick_s(trace: Trace) -> float | None:
    """Seconds between the ticks of a quantised clock; None if the clock is not quantised.

    Quantised is a clock with many equal readings whose distinct ones lie whole multiples of one step apart.
    """
    gaps = np.diff(trace.arrival_s)
    steps = gaps[gaps > 0]
    if len(steps) == 0 or np.mean(gaps == 0) < _QUANTISED_SHARE:
        return None
    multiples = steps / np.percentile(steps, 5, method="lower")
    regular = np.abs(multiples - np.rint(multiples)) < 0.05
    return float(np.median(steps[np.rint(multiples) == 1])) if np.mean(regular) >= 0.9 else None


def dequantize(trace: Trace, seed: int) -> Trace:
    """Spreads the requests of each tick of a quantised clock over that tick, uniformly and in their order.

    Replayed as they stand, such traces are synchronised bursts. The number of requests in each tick stays.

    Raises: OptionError: the clock is not quantised.
    """
    tick = tick_s(trace)
    if tick is None:
        raise OptionError(f"the clock of {trace.name} is not quantised: there is nothing to spread")
    ticks, of_request, counts = np.unique(trace.arrival_s, return_inverse=True, return_counts=True)
    width = np.minimum(np.append(np.diff(ticks), tick), tick)
    offsets = np.random.default_rng(seed).random(len(trace)) * width[of_request]
    within = np.lexsort((offsets, of_request))  # ascending inside each tick; the ticks stay where they are
    arrival_s = trace.arrival_s + offsets[within]
    accounting = trace.accounting.alter(f"spread over clock ticks of {tick:g} s", int(counts.sum()))
    return replace(trace, arrival_s=arrival_s, accounting=accounting)


def from_zero(trace: Trace) -> Trace:
    """The same schedule with its first request at 0."""
    return replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0])


def _scaled_block(block_tokens: int, factor: float) -> int:
    exact = block_tokens * factor
    nearest = max(1, round(exact))
    if abs(nearest - exact) > 0.01 * exact:
        near = sorted({max(1, int(exact)), int(exact) + 1})
        fitting = " or ".join(f"{tokens / block_tokens:g} ({tokens}-token blocks)" for tokens in near)
        raise OptionError(
            f"--length-scale {factor:g} makes {block_tokens}-token blocks {exact:g} tokens long; use {fitting}"
        )
    return nearest


def _covering(blocks: Blocks, input_tokens: NDArray[np.int64]) -> Blocks:
    """Only as many leading blocks of each request as its tokens begin."""
    counts = -(-input_tokens // blocks.block_tokens)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    ids = np.concatenate([blocks.of(index)[:count] for index, count in enumerate(counts)])
    return Blocks(ids, offsets, blocks.block_tokens)
