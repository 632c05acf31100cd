"""C9: cost of the prefix cache without hits.

Claim: hashing and indexing blocks is cheap enough for the cache to be on by default.

Goal: at most 1 % of the throughput lost at 0 % hits, over 256 requests.

Method: the same 256 prompts, no two of which share a block, with the cache on and off; every run starts with an empty
cache. Both sides compute the same batches on one loaded model and must give the same tokens, so only the scheduler's
work differs. That is also measured directly: the seconds outside the runner, on minus off, as a share of the wall
clock, which is far less noisy than the ratio of two wall clocks.
"""

import argparse

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.workload import uniform_workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine
from engine.flags import DEFAULT_STEP_LIMITS

_PROMPT_LENS = (32, 128)
_OUTPUT_LENS = (8, 24)


def run(settings: Settings) -> Outcome:
    """Serves the workload with the cache on and off, alternating."""
    num_requests = 12 if settings.quick else settings.options.requests
    limits = DEFAULT_STEP_LIMITS["cpu"]
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=_PROMPT_LENS[1] + _OUTPUT_LENS[1],
        )
    )
    workload = uniform_workload(
        num_requests,
        prompt_lens=_PROMPT_LENS,
        output_lens=_OUTPUT_LENS,
        vocab_size=chosen_shape(settings).vocab_size,
    )
    block_size = parts.info.block_size
    if len({prompt[:block_size] for prompt in workload.prompts}) != num_requests:
        raise BenchmarkError("two prompts share their first block, which would be a prefix cache hit")
    rounds = alternate_runs(
        {
            "on": lambda: serve_anew(parts, workload, enable_prefix_caching=True),
            "off": lambda: serve_anew(parts, workload, enable_prefix_caching=False),
        },
        settings,
    )
    require_equal_ids("cache on and off", rounds.runs["on"][0].output_ids, rounds.runs["off"][0].output_ids)
    wall_s = rounds.samples(lambda run: run.wall_s)
    outside_s = rounds.samples(_seconds_outside)
    ratio = wall_s.ratio("on", "off")
    extra_s = outside_s.best("on") - outside_s.best("off")
    results = (
        Result(
            "C9",
            "throughput lost to the prefix cache at 0 % hits",
            100 * (ratio.best - 1),
            "%",
            goal=1.0,
            direction="at most",
            floor=0.0,
            note=f"{100 * (ratio.low - 1):+.2f}..{100 * (ratio.high - 1):+.2f} %; {describe(settings)}",
        ),
        Result(
            "C9",
            "time the cache adds outside the runner, of the wall clock",
            100 * extra_s / wall_s.best("off"),
            "%",
            goal=1.0,
            direction="at most",
            floor=0.0,
            note=f"{1e6 * extra_s / num_requests:.1f} us per request",
        ),
    )
    return Outcome(results, raw={"wall_s": wall_s.raw, "outside_runner_s": outside_s.raw})


def _seconds_outside(run: Run) -> float:
    return sum(step.seconds - step.execute_s for step in run.steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, quantization="int8")
    parser.add_argument("--requests", type=int, default=256, help="requests per run (default: 256)")
