"""Drafts by prompt lookup: what they gain where an answer repeats itself, and what they cost where it does not.

Claim: with --speculative-config an answer that repeats itself comes in a fraction of the time, token by token the same,
and requests that repeat nothing lose little.

Method: one engine with random weights, with and without drafts on a new scheduler each, alternating; the tokens must be
the same. An answer of one token repeated is the best case: every draft is right. Greedy answers of random weights
repeat themselves in parts. Answers at temperature 1 are random tokens, of which hardly any pair occurs twice: the cost
of lookups alone. Of a vocabulary of 16 every pair occurs soon and what follows it is random: the cost of drafts that
are wrong.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from engine.bench.engine_options import add_engine_arguments, describe, engine_config, shape_name
from engine.bench.fresh_scheduler import Scheduled, forget_requests
from engine.bench.rounds import alternate_runs
from engine.bench.serve import engine, serve
from engine.core.drafts import DraftLimits
from engine.core.outputs import SchedulerStats
from engine.core.schedulers import make_scheduler
from engine.serving.parts import EngineParts

_LIMITS = DraftLimits(num_speculative_tokens=8, prompt_lookup_max=4, prompt_lookup_min=2)
_PROMPT_LEN = 64
_MAX_NUM_SEQS = 64
_PLAIN, _DRAFTS = "without drafts", "with drafts"


@dataclass(frozen=True, slots=True)
class _Case:
    """One workload.

    Attributes:
        num_requests: answered at once.
        temperature: of all of them.
        num_choices: tokens that an answer consists of, by logit bias; 0: the whole vocabulary.
    """

    name: str
    num_requests: int
    temperature: float
    num_choices: int = 0


_CASES = (
    _Case("one answer, drafts right", 1, 0.0, 1),
    _Case("one answer that repeats itself in parts", 1, 0.0),
    _Case("one answer that repeats nothing", 1, 1.0),
    _Case("32 answers that repeat nothing", 32, 1.0),
    _Case("one answer, drafts wrong", 1, 1.0, 16),
    _Case("32 answers, drafts wrong", 32, 1.0, 16),
)


def run(settings: Settings) -> Outcome:
    """Serves each workload with and without drafts, alternating."""
    num_tokens = 24 if settings.quick else 128
    config = engine_config(
        settings,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        max_model_len=_PROMPT_LEN + num_tokens,
    )
    parts = engine(config)
    results: list[Result] = []
    raw: dict[str, object] = {}
    for case in _CASES:
        stats: list[SchedulerStats] = []
        rounds = alternate_runs(
            {
                _PLAIN: _served(parts, case, num_tokens, shape_name(settings), None, []),
                _DRAFTS: _served(parts, case, num_tokens, shape_name(settings), _LIMITS, stats),
            },
            settings,
        )
        runs = rounds.runs
        require_equal_ids("drafts", runs[_DRAFTS][0].output_ids, runs[_PLAIN][0].output_ids)
        tpot_s = rounds.samples(_mean_gap_s)
        ratio = tpot_s.ratio(_PLAIN, _DRAFTS)
        num_drafted, num_accepted = stats[-1].num_draft_tokens_total, stats[-1].num_accepted_tokens_total
        accepted = (
            f"{num_accepted} of {num_drafted} drafted tokens accepted, {case.num_requests * num_tokens} generated"
        )
        results += [
            Result("speculative", f"{case.name}: TPOT", 1e3 * tpot_s.best(_DRAFTS), "ms", note=accepted),
            Result(
                "speculative",
                f"{case.name}: TPOT without drafts over with",
                ratio.best,
                "x",
                note=f"{ratio.low:.2f}..{ratio.high:.2f}; {1e3 * tpot_s.best(_PLAIN):.2f} ms without; "
                f"{describe(settings)}",
            ),
        ]
        raw[case.name] = {
            "tpot_s": tpot_s.raw,
            "num_draft_tokens": num_drafted,
            "num_accepted_tokens": num_accepted,
            "steps": rounds.raw_steps(),
        }
    return Outcome(tuple(results), raw)


def _mean_gap_s(run: Run) -> float:
    return statistics.fmean(gap_s for index in range(len(run.output_ids)) for gap_s in run.gaps_s(index))


def _served(
    parts: EngineParts,
    case: _Case,
    num_tokens: int,
    shape: str,
    drafts: DraftLimits | None,
    stats: list[SchedulerStats],
) -> Callable[[], Run]:
    """Returns what serves a workload on a new scheduler, and appends the scheduler's totals to `stats`."""
    prompts = np.random.default_rng(0).integers(1, SHAPES[shape].vocab_size, (case.num_requests, _PROMPT_LEN)).tolist()
    biases = tuple((token_id, 100.0) for token_id in range(1, 1 + case.num_choices))

    def measure() -> Run:
        config = replace(parts.scheduler.config, drafts=drafts, enable_prefix_caching=False)
        scheduled = Scheduled(make_scheduler(config), parts.runner)
        lengths = [num_tokens] * case.num_requests
        served = serve(scheduled, prompts, lengths, temperature=case.temperature, logit_bias=biases)
        forget_requests(scheduled)
        stats.append(scheduled.scheduler.stats())
        return served

    return measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
