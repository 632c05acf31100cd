"""Decode steps of several systems at one context length, alternating: the ratios of their median steps."""

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload
from engine.bench.decode import median_decode_s
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.serve import engine
from engine.bench.transformers_peer import random_model
from engine.config import EngineConfig
from engine.flags import DEFAULT_STEP_LIMITS

MAX_ROWS = 32
MAX_BATCHED_TOKENS = DEFAULT_STEP_LIMITS["cpu"].max_num_batched_tokens
_ROWS = (1, MAX_ROWS)
_CONTEXT = 128
_NUM_STEPS = 20
# The first admitted request decodes until the last one is admitted, and then through the measured steps.
_MAX_TOKENS = -(-MAX_ROWS * (_CONTEXT + 1) // MAX_BATCHED_TOKENS) + 2 + _NUM_STEPS
MAX_MODEL_LEN = _CONTEXT + _MAX_TOKENS

DecodeStep = Callable[[int], float]
"""Serves a number of streams and returns the median seconds of a decode step."""


def compare_steps(
    benchmark_id: str,
    settings: Settings,
    steps: Mapping[str, DecodeStep],
    base: str,
    goals: Mapping[str, float | None],
    note: str,
) -> Outcome:
    """Measures all systems at 1 and 32 rows, or 1 and 4 with --quick.

    Args:
        benchmark_id: the benchmark's name.
        settings: rounds, and whether it is quick.
        steps: by system.
        base: the system that the others are divided by.
        goals: the least ratio of each other system that is reported; None: it has no goal.
        note: what was measured, for the report.
    """
    results, raw = [], {}
    for num_rows in (1, 4) if settings.quick else _ROWS:
        samples = alternate(
            {name: _bound(step, num_rows) for name, step in steps.items()},
            rounds=settings.rounds,
            progress=settings.progress,
        )
        raw[f"{num_rows} rows"] = samples.raw
        times = ", ".join(f"{name} {1e3 * samples.best(name):.1f} ms" for name in samples.raw)
        for other, goal in goals.items():
            ratio = samples.ratio(other, base)
            results.append(
                Result(
                    benchmark_id, f"{num_rows} rows: step of {other} over {base}", ratio.best, "x",
                    goal=goal, note=f"{ratio}; {times}; {note}",
                )
            )  # fmt: skip
    return Outcome(tuple(results), raw)


def _bound(step: DecodeStep, num_rows: int) -> Callable[[], float]:
    return lambda: step(num_rows)


def chairlift_step(config: EngineConfig, vocab_size: int) -> DecodeStep:
    """Starts an engine, of MAX_ROWS, MAX_BATCHED_TOKENS and MAX_MODEL_LEN, and serves random prompts."""
    parts = engine(config)
    prompts = np.random.default_rng(0).integers(1, vocab_size, (MAX_ROWS, _CONTEXT)).tolist()

    def step(num_rows: int) -> float:
        workload = Workload(tuple(map(tuple, prompts[:num_rows])), (_MAX_TOKENS,) * num_rows)
        return median_decode_s(serve_anew(parts, workload))

    return step


def transformers_step(model_dir: Path, vocab_size: int, dtype: torch.dtype, *, threads: int) -> DecodeStep:
    """Makes a model with random weights; a step is a forward of it with its own cache, and the greedy choice."""
    model: Any = random_model(model_dir, torch.device("cpu"), dtype)
    prompts = torch.randint(1, vocab_size, (MAX_ROWS, _CONTEXT))

    @torch.inference_mode()
    def step(num_rows: int) -> float:
        torch.set_num_threads(threads)
        output = model(prompts[:num_rows], use_cache=True, logits_to_keep=1)
        seconds = []
        for _ in range(_NUM_STEPS):
            token_ids = output.logits[:, -1:].argmax(-1)
            began_s = time.perf_counter()
            output = model(token_ids, cache=output.cache, use_cache=True)
            seconds.append(time.perf_counter() - began_s)
        return statistics.median(seconds)

    return step
