"""A single request: time per token at batch 1, and the part of a step outside the model.

Claim: continuous batching does not slow down a single request; scheduling, packing, sampling and bookkeeping are a
small part of a step even when the step is short.

Goal: under 10 % of a decode step spent outside the model on the 135M shape; TPOT below that of `transformers`
`generate`.

Method: one random checkpoint in both, one prompt of 32 tokens, 64 greedy tokens, alternating. Before the timing,
`transformers` checks every id, position by position (int8 ids are only counted). TPOT is the mean time between tokens.
The model is the compiled step, from the batch's tensors to its logits; its share is taken over the decode steps.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from chairlift.bench.agreement import require_same_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.engine_options import add_engine_arguments, describe, engine_config, shape_name
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.model_clock import ModelClock
from engine.bench.rounds import Rounds, alternate_runs
from engine.bench.serve import engine
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_peer import generate_streaming
from engine.flags import DEFAULT_STEP_LIMITS
from engine.serving.parts import EngineParts

_CHAIRLIFT, _TRANSFORMERS = "Chairlift", "transformers"
_PROMPT_LEN = 32


def run(settings: Settings) -> Outcome:
    """Answers the prompt with both, alternating."""
    num_tokens = 8 if settings.quick else 64
    shape = shape_name(settings)
    settings.progress(f"saving a random checkpoint of shape {shape}")
    checkpoint = save_checkpoint(shape, settings.scratch)
    reference = load_reference(checkpoint)
    limits = DEFAULT_STEP_LIMITS["cpu"]
    config = engine_config(
        settings,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=_PROMPT_LEN + num_tokens,
    )
    clock = ModelClock()
    with clock.installed():
        parts = engine(replace(config, model=str(checkpoint), load_format="auto"))
    prompt = np.random.default_rng(0).integers(1, SHAPES[shape].vocab_size, _PROMPT_LEN)
    workload = Workload((tuple(prompt.tolist()),), (num_tokens,))

    agreement = greedy_agreement(reference, workload.prompts, serve_anew(parts, workload).output_ids)
    if settings.options.quantization == "none" and settings.options.kv_cache_dtype == "auto":
        require_same_ids(_CHAIRLIFT, agreement)
    model_s: list[list[float]] = []
    rounds = alternate_runs(
        {
            _CHAIRLIFT: _timed(parts, workload, clock, model_s),
            _TRANSFORMERS: lambda: generate_streaming(reference, workload),
        },
        settings,
    )
    model_s = model_s[-settings.rounds :]
    return _outcome(rounds, model_s, f"{agreement}; {describe(settings)}")


def _timed(parts: EngineParts, workload: Workload, clock: ModelClock, model_s: list[list[float]]) -> Callable[[], Run]:
    def measure() -> Run:
        clock.take()
        run = serve_anew(parts, workload)
        model_s.append(clock.take())
        return run

    return measure


def _outcome(rounds: Rounds, model_s: list[list[float]], note: str) -> Outcome:
    tpot_s = rounds.samples(lambda run: statistics.fmean(run.gaps_s(0)))
    ratio = tpot_s.ratio(_TRANSFORMERS, _CHAIRLIFT)
    parts = [step_parts(run, seconds) for run, seconds in zip(rounds.runs[_CHAIRLIFT], model_s, strict=True)]
    best = min(parts, key=lambda part: part.share_outside)
    results = (
        Result("solo", "TPOT", 1e3 * tpot_s.best(_CHAIRLIFT), "ms", note=note),
        Result(
            "solo",
            "TPOT, transformers over Chairlift",
            ratio.best,
            "x",
            goal=1.0,
            note=f"{ratio.low:.2f}..{ratio.high:.2f}; transformers {1e3 * tpot_s.best(_TRANSFORMERS):.2f} ms, fp32",
        ),
        Result(
            "solo",
            "share of a decode step outside the model",
            100 * best.share_outside,
            "%",
            goal=10.0,
            direction="at most",
            floor=0.0,
            note=f"{1e6 * best.runner_s:.0f} us pack and sample, {1e6 * best.scheduler_s:.0f} us schedule and update; "
            f"median {100 * statistics.median(part.share_outside for part in parts):.1f} %",
        ),
    )
    raw = {
        "tpot_s": tpot_s.raw,
        "mean_decode_step": [part._asdict() for part in parts],
        "model_s": model_s,
        "step_s": [[step.seconds for step in run.steps] for run in rounds.runs[_CHAIRLIFT]],
    }
    return Outcome(results, raw)


class StepParts(NamedTuple):
    """Parts of the mean decode step of a run in seconds: the model, the runner around it, and the scheduler."""

    model_s: float
    runner_s: float
    scheduler_s: float

    @property
    def share_outside(self) -> float:
        """Share of the step outside the model."""
        return 1 - self.model_s / sum(self)


def step_parts(run: Run, model_s: Sequence[float]) -> StepParts:
    """Divides a run's steps, but for the first, which is the prompt's; model_s is what the model had of each."""
    steps = run.steps[1:]
    model, execute, total = (
        statistics.fmean(seconds)
        for seconds in (model_s[1:], [step.execute_s for step in steps], [step.seconds for step in steps])
    )
    return StepParts(model, execute - model, total - execute)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
