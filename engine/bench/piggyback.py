"""C7: decoding rows in the step of a prompt chunk.

Claim: a few decoding rows add almost no time to a step that computes a prompt chunk (Sarathi-Serve, OSDI'24, Table 2),
because the weights are read anyway.

Goal: a step of a chunk of 256 and 8 decodes at a context of 256 takes at most 1.10x a step of the chunk alone.

Method: a prompt of four chunks and one more token, once on an idle engine and once while 8 requests with 256 tokens of
context decode. The seconds of the four steps with a full chunk are compared, so that both sides attend to the same
prefixes. One loaded model serves both; the prompt's answer must be the same. The floor counts matrix operations only:
a chunk's tokens need the body, the decodes the body and the output head.
"""

import argparse

import numpy as np

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine

_ALONE, _WITH_DECODES = "chunk alone", "chunk and decodes"
_NUM_CHUNKS = 4
_NUM_STREAMS = 8
_PROMPT_OUTPUT_TOKENS = 4


def run(settings: Settings) -> Outcome:
    """Serves the prompt with and without decoding requests, alternating."""
    chunk, context = (16, 24) if settings.quick else (256, 256)
    budget = chunk + _NUM_STREAMS
    arrival_step = -(-_NUM_STREAMS * context // budget) + 4
    stream_tokens = arrival_step + _NUM_CHUNKS + _PROMPT_OUTPUT_TOKENS
    prompt_len = _NUM_CHUNKS * chunk + 1
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=_NUM_STREAMS + 1,
            max_num_batched_tokens=budget,
            max_model_len=max(prompt_len + _PROMPT_OUTPUT_TOKENS, context + stream_tokens),
        )
    )
    shape = chosen_shape(settings)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(1, shape.vocab_size, n).tolist()) for n in [context] * _NUM_STREAMS + [prompt_len]]
    together = Workload(tuple(prompts), (stream_tokens,) * _NUM_STREAMS + (_PROMPT_OUTPUT_TOKENS,))
    alone = Workload((prompts[-1],), (_PROMPT_OUTPUT_TOKENS,))
    arrivals = (0,) * _NUM_STREAMS + (arrival_step,)
    rounds = alternate_runs(
        {
            _ALONE: lambda: serve_anew(parts, alone, max_num_batched_tokens=chunk),
            _WITH_DECODES: lambda: serve_anew(parts, together, after_steps=arrivals),
        },
        settings,
    )
    answers = {name: runs[0].output_ids[-1] for name, runs in rounds.runs.items()}
    require_equal_ids("the prompt alone and with decodes", [answers[_ALONE]], [answers[_WITH_DECODES]])

    chunk_s = rounds.samples(lambda run: seconds_of_chunks(run, chunk))
    ratio = chunk_s.ratio(_WITH_DECODES, _ALONE)
    decode_ops = _NUM_STREAMS * (shape.num_body_weights + shape.num_head_weights)
    result = Result(
        "C7",
        f"step(chunk {chunk} + {_NUM_STREAMS} decodes) over step(chunk {chunk})",
        ratio.best,
        "x",
        goal=1.10,
        direction="at most",
        floor=1 + decode_ops / (chunk * shape.num_body_weights),
        note=f"{ratio.low:.3f}..{ratio.high:.3f}; {1e3 * chunk_s.best(_WITH_DECODES) / _NUM_CHUNKS:.1f} ms against "
        f"{1e3 * chunk_s.best(_ALONE) / _NUM_CHUNKS:.1f} ms; {describe(settings)}",
    )
    return Outcome((result,), raw={"seconds_of_chunks": chunk_s.raw, "steps": rounds.raw_steps()})


def seconds_of_chunks(run: Run, chunk: int) -> float:
    """Returns the seconds of the steps with a full chunk of the prompt, which is the last request."""
    num_companions = len(run.output_ids) - 1
    start = next(i for i, step in enumerate(run.steps) if step.ended_s > run.arrivals_s[-1])
    steps = run.steps[start : start + _NUM_CHUNKS]
    for step in steps:
        if (step.num_rows, step.num_tokens) != (num_companions + 1, num_companions + chunk):
            raise BenchmarkError(
                f"a step has {step.num_rows} rows and {step.num_tokens} tokens, not {num_companions} decodes and "
                f"a chunk of {chunk}"
            )
    return sum(step.seconds for step in steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, quantization="int8")
