"""Speed of a decode step by the dtype in which a CPU stores weights.

Claim: weights in bf16 are widened in registers, so that a step reads half the bytes and computes as much.

Goal: a step with weights in bf16 takes at most the time of the same step in fp32, with one row and with 32. A step of
transformers in bf16 is printed beside them.

Method: decode-only steps at a context of 128, random weights, on two engines that differ in --dtype only; a run's
figure is its median step. transformers computes one token for the same number of rows at the same context, greedily, by
a forward of the model with its own cache, on the same number of threads.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import write_shape
from chairlift.bench.workload import Workload
from engine.bench.decode import median_decode_s
from engine.bench.engine_options import add_engine_arguments, chosen_shape, engine_config, shape_name
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.serve import engine
from engine.bench.transformers_peer import random_model
from engine.config import DEFAULT_STEP_LIMITS, DtypeName

_ROWS = (1, 32)
_CONTEXT = 128
_NUM_STEPS = 20


def run(settings: Settings) -> Outcome:
    """Measures all variants at each number of rows, alternating."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    steps = {f"Chairlift, {dtype}": _chairlift_step(settings, dtype) for dtype in dtypes}
    steps["transformers, bfloat16"] = _transformers_step(settings)
    results, raw = [], {}
    for num_rows in (1, 4) if settings.quick else _ROWS:
        samples = alternate(
            {name: _bound(step, num_rows) for name, step in steps.items()},
            rounds=settings.rounds,
            progress=settings.progress,
        )
        raw[f"{num_rows} rows"] = samples.raw
        times = ", ".join(f"{name} {1e3 * samples.best(name):.1f} ms" for name in samples.raw)
        for other, goal in (("Chairlift, float32", 1.0), ("transformers, bfloat16", None)):
            ratio = samples.ratio(other, "Chairlift, bfloat16")
            results.append(
                Result(
                    "weights-dtype", f"{num_rows} rows: step of {other} over Chairlift, bfloat16", ratio.best, "x",
                    goal=goal, note=f"{ratio}; {times}; {shape_name(settings)}",
                )
            )  # fmt: skip
    return Outcome(tuple(results), raw)


def _bound(step: Callable[[int], float], num_rows: int) -> Callable[[], float]:
    return lambda: step(num_rows)


def _chairlift_step(settings: Settings, dtype: DtypeName) -> Callable[[int], float]:
    """Returns a function that serves a number of streams and returns the seconds of a decode step."""
    limits = DEFAULT_STEP_LIMITS["cpu"]
    max_rows = max(_ROWS)
    # The first admitted request decodes until the last one is admitted, and then through the measured steps.
    max_tokens = -(-max_rows * (_CONTEXT + 1) // limits.max_num_batched_tokens) + 2 + _NUM_STEPS
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=max_rows,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=_CONTEXT + max_tokens,
            dtype=dtype,
        )
    )
    prompts = np.random.default_rng(0).integers(1, chosen_shape(settings).vocab_size, (max_rows, _CONTEXT)).tolist()

    def step(num_rows: int) -> float:
        workload = Workload(tuple(map(tuple, prompts[:num_rows])), (max_tokens,) * num_rows)
        return median_decode_s(serve_anew(parts, workload))

    return step


def _transformers_step(settings: Settings) -> Callable[[int], float]:
    """Returns a function that computes a number of rows and returns the median seconds of a token."""
    shape = shape_name(settings)
    model = random_model(write_shape(shape, settings.scratch), torch.device("cpu"), torch.bfloat16)
    prompts = torch.randint(1, chosen_shape(settings).vocab_size, (max(_ROWS), _CONTEXT))

    @torch.inference_mode()
    def step(num_rows: int) -> float:
        torch.set_num_threads(settings.threads)
        output = model(prompts[:num_rows], use_cache=True, logits_to_keep=1)
        seconds = []
        for _ in range(_NUM_STEPS):
            token_ids = output.logits[:, -1:].argmax(-1)
            began_s = time.perf_counter()
            output = model(token_ids, past_key_values=output.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - began_s)
        return statistics.median(seconds)

    return step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
