"""C8: first token of a prompt with a cached prefix.

Claim: a prompt that shares 1,024 tokens with an earlier one costs no more than its other 32 (prefix caching, as in
RadixAttention, arXiv:2312.07104, and vLLM).

Goal: TTFT at least 12x lower.

Method: "cold" is a prompt of 1,024 + 32 tokens on an idle engine with an empty prefix cache. "Warm" is the same prompt
on an engine that has just answered one with the same 1,024 and 32 others. 16 output tokens each, which must be the
same; the warm one must find 1,024 tokens. The floor counts tokens.
"""

import argparse
from collections.abc import Callable

import numpy as np

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import forget_requests, schedule_anew
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine, serve
from engine.flags import DEFAULT_STEP_LIMITS

_NUM_OUTPUT_TOKENS = 16
_NUM_UNIQUE = 32


def run(settings: Settings) -> Outcome:
    """Serves the prompt with a cold and with a warm cache, alternating."""
    num_shared = 64 if settings.quick else 1024
    prompt_len = num_shared + _NUM_UNIQUE
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=2,
            max_num_batched_tokens=DEFAULT_STEP_LIMITS["cpu"].max_num_batched_tokens,
            max_model_len=prompt_len + _NUM_OUTPUT_TOKENS,
        )
    )
    rng = np.random.default_rng(0)
    vocab_size = chosen_shape(settings).vocab_size
    shared, own, others = (rng.integers(1, vocab_size, n).tolist() for n in (num_shared, _NUM_UNIQUE, _NUM_UNIQUE))

    def answer(earlier: list[list[int]], num_hits: int) -> Callable[[], Run]:
        def measure() -> Run:
            scheduled = schedule_anew(parts, enable_prefix_caching=True)
            for prompt in earlier:
                serve(scheduled, [prompt], [1])
            run = serve(scheduled, [shared + own], [_NUM_OUTPUT_TOKENS])
            hits = scheduled.scheduler.stats().prefix_cache_hits_total
            if hits != num_hits:
                raise BenchmarkError(f"{hits} tokens were found in the prefix cache, expected {num_hits}")
            forget_requests(scheduled)
            return run

        return measure

    rounds = alternate_runs({"cold": answer([], 0), "warm": answer([shared + others], num_shared)}, settings)
    require_equal_ids("cold and warm", rounds.runs["cold"][0].output_ids, rounds.runs["warm"][0].output_ids)
    ttft_s = rounds.samples(lambda run: run.ttft_s(0))
    ratio = ttft_s.ratio("cold", "warm")
    result = Result(
        "C8",
        f"TTFT of {num_shared} + {_NUM_UNIQUE} tokens, cold over warm",
        ratio.best,
        "x",
        goal=12.0,
        floor=prompt_len / _NUM_UNIQUE,
        note=f"{ratio.low:.1f}..{ratio.high:.1f}; {1e3 * ttft_s.best('cold'):.0f} ms against "
        f"{1e3 * ttft_s.best('warm'):.1f} ms; {describe(settings)}",
    )
    return Outcome((result,), raw={"ttft_s": ttft_s.raw, "steps": rounds.raw_steps()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, quantization="int8")
