"""C13, C14: a decode-only step compared with the time the machine needs for its bytes and products.

Claim: matrix products and reads of the cache take most of a step, with one request and with 32.

Goal: C13: a step of 32 rows at a context of 256, int8 weights and int8 KV, reaches 55 % of the model time. C14: 32
streams get at least 6x the tokens per second of one.

Method: 32 requests, then one, with 240 prompt tokens; counted are steps in which all decode, while contexts go from 240
to about 275; a run's figure is its median step. The model time (`model_time`) takes the bandwidth of the same run and
the rate that PyTorch's best product of this type reaches with 32 rows. Because other products may be better than
PyTorch's, the share of a harder floor is printed too, from the machine's peak rate on large matrices.
"""

import argparse
import statistics
from collections.abc import Callable

import numpy as np

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.model_time import DecodeTime, library_ops_per_s, peak_ops_per_s
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine
from engine.flags import DEFAULT_STEP_LIMITS

_NUM_ROWS = 32
_CONTEXT = 256
_NUM_STEPS = 20  # steps in which all rows decode


def run(settings: Settings) -> Outcome:
    """Runs the decode with all streams and with one, alternating."""
    context = 32 if settings.quick else _CONTEXT
    prompt_len = context - 16
    budget = DEFAULT_STEP_LIMITS["cpu"].max_num_batched_tokens
    # The first admitted request decodes until the last one is admitted, and then through the measured steps.
    max_tokens = -(-_NUM_ROWS * (prompt_len + 1) // budget) + 2 + _NUM_STEPS
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=_NUM_ROWS,
            max_num_batched_tokens=budget,
            max_model_len=prompt_len + max_tokens,
        )
    )
    shape = chosen_shape(settings)
    prompts = np.random.default_rng(0).integers(1, shape.vocab_size, (_NUM_ROWS, prompt_len))
    workload = Workload(tuple(map(tuple, prompts.tolist())), (max_tokens,) * _NUM_ROWS)
    first = Workload(workload.prompts[:1], workload.max_tokens[:1])

    def variant(work: Workload) -> Callable[[], Run]:
        return lambda: serve_anew(parts, work)

    rounds = alternate_runs({"all": variant(workload), "one": variant(first)}, settings)
    together, alone = rounds.runs["all"][0].output_ids[:1], rounds.runs["one"][0].output_ids
    require_equal_ids(f"1 and {_NUM_ROWS} streams", alone, together)
    step_s = rounds.samples(median_decode_s)
    all_s, one_s = step_s.best("all"), step_s.best("one")

    quantization = settings.options.quantization
    weight_bytes = 1 if quantization == "int8" else 4
    kv_bytes = 1 if settings.options.kv_cache_dtype == "int8" else 4
    bandwidth = settings.floors.read_bytes_per_s
    library = library_ops_per_s(quantization, _NUM_ROWS, shape)
    peak = peak_ops_per_s(settings.floors, quantization)
    model = DecodeTime(shape, weight_bytes, kv_bytes, bandwidth, library)
    hardest = DecodeTime(shape, weight_bytes, kv_bytes, bandwidth, peak)
    model_s, floor_s = model.seconds(_NUM_ROWS, context), hardest.seconds(_NUM_ROWS, context)
    gain = step_s.ratio("one", "all")
    results = (
        Result(
            "C13",
            f"model time over step, {_NUM_ROWS} rows at context {context}",
            100 * model_s / all_s,
            "%",
            goal=55.0,
            note=f"{1e3 * model_s:.1f} ms at {library / 1e9:,.0f} GOP/s as PyTorch's products reach; "
            f"step {1e3 * all_s:.1f} ms; {describe(settings)}",
        ),
        Result(
            "C13",
            "the machine's floor over the same step",
            100 * floor_s / all_s,
            "%",
            floor=100.0,
            note=f"{1e3 * floor_s:.1f} ms at {peak / 1e9:,.0f} GOP/s and {bandwidth / 1e9:.1f} GB/s",
        ),
        Result(
            "C14",
            f"tokens per second, {_NUM_ROWS} streams over one",
            _NUM_ROWS * gain.best,
            "x",
            goal=6.0,
            floor=_NUM_ROWS * hardest.seconds(1, context) / floor_s,
            note=f"{_NUM_ROWS * gain.low:.2f}..{_NUM_ROWS * gain.high:.2f}; {_NUM_ROWS / all_s:,.1f} tok/s "
            f"against {1 / one_s:,.1f}",
        ),
    )
    raw = {"median_step_s": step_s.raw, "library_ops_per_s": library, "steps": rounds.raw_steps()}
    return Outcome(results, raw)


def median_decode_s(run: Run) -> float:
    """Returns the median seconds of the steps in which every request decodes."""
    num_requests = len(run.output_ids)
    seconds = [step.seconds for step in run.steps if step.num_rows == step.num_tokens == num_requests]
    if len(seconds) < _NUM_STEPS:
        raise BenchmarkError(f"{len(seconds)} steps had {num_requests} decodes, at least {_NUM_STEPS} are required")
    return statistics.median(seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, quantization="int8", kv_cache_dtype="int8")
