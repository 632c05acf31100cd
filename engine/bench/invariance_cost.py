"""Cost of `--batch-invariant`.

Claim: every element of a product is summed in a fixed order in any batch, so batch invariance needs no slower mode.

Goal: none; the cost is measured and printed. The claim is 1.00, within the difference of two equal variants.

Method: the peers' mixed workload, 64 requests at once, on two engines that differ in the flag only. Both must give the
same tokens in every round; a third variant without the flag shows the noise.
"""

import argparse
from collections.abc import Callable

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload, mixed_workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine
from engine.flags import DEFAULT_STEP_LIMITS

_FAST, _INVARIANT, _FAST_AGAIN = "fast", "batch-invariant", "fast again"


def run(settings: Settings) -> Outcome:
    """Serves the workload with and without the flag, alternating."""
    vocab_size = chosen_shape(settings).vocab_size
    workload = mixed_workload(64, vocab_size=vocab_size)
    if settings.quick:
        workload = Workload(tuple(prompt[:24] for prompt in workload.prompts[:8]), (4,) * 8)

    def variant(batch_invariant: bool) -> Callable[[], Run]:
        limits = DEFAULT_STEP_LIMITS["cpu"]
        longest = max(
            len(prompt) + num_tokens for prompt, num_tokens in zip(workload.prompts, workload.max_tokens, strict=True)
        )
        parts = engine(
            engine_config(
                settings,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=longest,
                batch_invariant=batch_invariant,
            )
        )
        return lambda: serve_anew(parts, workload)

    fast, invariant = variant(False), variant(True)
    rounds = alternate_runs({_FAST: fast, _INVARIANT: invariant, _FAST_AGAIN: fast}, settings)
    answers = {name: runs[0].output_ids for name, runs in rounds.runs.items()}
    require_equal_ids("with and without --batch-invariant", answers[_INVARIANT], answers[_FAST])
    wall_s = rounds.samples(lambda run: run.wall_s)
    cost, noise = wall_s.ratio(_INVARIANT, _FAST), wall_s.ratio(_FAST_AGAIN, _FAST)
    result = Result(
        "invariance",
        "throughput, fast mode over batch-invariant",
        cost.best,
        "x",
        note=f"{cost.low:.3f}..{cost.high:.3f}; two equal variants {noise.low:.3f}..{noise.high:.3f}; "
        f"{workload.num_output_tokens / wall_s.best(_INVARIANT):,.0f} tok/s; {describe(settings)}",
    )
    return Outcome((result,), raw={"wall_s": wall_s.raw})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
