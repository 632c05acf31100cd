"""C12: how fast paged attention reads the KV cache.

Claim: decode attention is bound by one read of keys and values, and blocks in random order do not slow it down.

Goal: 60 % of the machine's read bandwidth with an fp32 cache, for 32 sequences of 512 tokens and for 32 of 1 to 1,024.

Method: 16 query heads, 8 KV heads of 128 (Qwen3-0.6B's), blocks of 16 tokens, shuffled; one query per sequence. Each
call reads the caches of several layers, 512 MiB or more in all, which exceeds the CPU's caches as in a model.
In turn with the calls, the same amount is read by a plain sum. Before that, rows are compared with attention over the
unquantised keys and values. An int8 cache has a quarter of the bytes and the same arithmetic: its share is lower where
arithmetic is the limit, and its gain is printed as time.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES
from engine.bench.attention_call import AttentionCall, make_attention_call

_BYTES = 512 * 2**20
_NUM_SEQS = 32
_DTYPES = {"fp32": torch.float32, "int8": torch.int8}
# Largest error of a row: rounding of sums in fp32; of 8 bits per element and scale in int8.
_TOLERANCES = {"fp32": 1e-5, "int8": 2e-2}


def run(settings: Settings) -> Outcome:
    """Measures both batches with both kinds of cache, alternating with a plain read of memory."""
    shape = SHAPES["tiny" if settings.quick else settings.options.shape]
    num_bytes = 2**20 if settings.quick else _BYTES
    mean = 32 if settings.quick else 512
    ragged = np.random.default_rng(0).integers(1, 2 * mean + 1, _NUM_SEQS).tolist()
    batches = {f"{_NUM_SEQS} x {mean}": [mean] * _NUM_SEQS, f"{_NUM_SEQS} x 1..{2 * mean}": ragged}
    per_token = 2 * shape.num_key_value_heads * shape.head_dim
    calls: dict[str, AttentionCall] = {}
    for batch, seq_lens in batches.items():
        for precision, dtype in _DTYPES.items():
            name = f"{batch}, {precision} KV"
            settings.progress(f"filling the caches of {name}")
            num_layers = -(-num_bytes // (per_token * sum(seq_lens) * dtype.itemsize))
            calls[name] = make_attention_call(
                shape, seq_lens, dtype, num_layers=num_layers, num_threads=settings.threads
            )
            _check(name, calls[name], _TOLERANCES[precision], seq_lens)

    array = torch.ones(num_bytes // 4)
    variants: dict[str, Callable[[], float]] = {name: _seconds_of(call.run) for name, call in calls.items()}
    variants["read"] = _seconds_of(array.sum)
    samples = alternate(variants, rounds=settings.rounds, progress=settings.progress)
    bandwidth = num_bytes / samples.best("read")
    shares: dict[str, Result] = {}
    for name, call in calls.items():
        rate = call.kv_bytes / samples.best(name)
        shares[name] = Result(
            "C12",
            f"paged attention, {name}: of the read bandwidth",
            100 * rate / bandwidth,
            "%",
            goal=60.0 if "fp32" in name else None,
            floor=100.0,
            note=f"{rate / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s",
        )
    for precision in _DTYPES:
        equal, uneven = (f"{batch}, {precision} KV" for batch in batches)
        shares[uneven] = shares[uneven].beside(shares[equal], "equal lengths")
    results = list(shares.values())
    results += [_gain(batch, calls, samples.best) for batch in batches]
    raw = {"seconds": samples.raw, "kv_bytes": {name: call.kv_bytes for name, call in calls.items()}, "ragged": ragged}
    return Outcome(tuple(results), raw)


def _gain(batch: str, calls: dict[str, AttentionCall], best_s: Callable[[str], float]) -> Result:
    """Time per token and layer, fp32 over int8."""
    per_element = {}
    for precision, dtype in _DTYPES.items():
        name = f"{batch}, {precision} KV"
        per_element[precision] = best_s(name) / (calls[name].kv_bytes // dtype.itemsize)
    return Result(
        "C12", f"paged attention, {batch}: fp32 KV over int8 KV", per_element["fp32"] / per_element["int8"], "x"
    )


def _seconds_of(function: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started_s = time.perf_counter()
        function()
        return time.perf_counter() - started_s

    return measure


def _check(name: str, call: AttentionCall, tolerance: float, seq_lens: Sequence[int]) -> None:
    """Raises BenchmarkError if a row of the shortest, the longest or the last sequence is wrong."""
    rows = call.run()
    for index in {seq_lens.index(min(seq_lens)), seq_lens.index(max(seq_lens)), len(seq_lens) - 1}:
        error = float((rows[index] - call.expected(index)).abs().max())
        if not error <= tolerance:  # NaN is wrong too
            raise BenchmarkError(f"{name}: error of row {index} is {error:.2g}, must be at most {tolerance:.2g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="0.6B", help="model shape that defines the heads (default: 0.6B)"
    )
