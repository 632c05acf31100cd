"""One alternating run of `transformers` in fp32 and of our engine in fp32 and in int8, on one checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload
from engine.bench.agreement import greedy_agreement, require_same_ids
from engine.bench.serve import engine, serve
from engine.bench.transformers_model import Answers
from engine.config import EngineConfig

FP32, INT8, TRANSFORMERS = "fp32", "int8", "transformers"

# Of int8's greedy choices, after the same tokens: random weights spread the logits of the best tokens far less than
# trained ones do, so that many choices are close. Below this the quantised model is another model.
_LEAST_INT8_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Goal:
    """What a precision has to reach: seconds of `transformers` over ours."""

    benchmark_id: str
    times_faster: float


def compare(
    settings: Settings,
    workload: Workload,
    *,
    model_dir: Path,
    model: Any,
    answer: Callable[[], Answers],
    max_num_seqs: int,
    goals: Mapping[str, Goal],
) -> Outcome:
    """Checks the ids of every contestant, then measures them in turn.

    Args:
        settings: rounds and threads.
        workload: what all of them answer.
        model_dir: the checkpoint.
        model: the same in `transformers`, which also judges the ids.
        answer: how `transformers` answers the workload.
        max_num_seqs: seats of our engine.
        goals: for each of FP32 and INT8.
    Raises: BenchmarkError: an fp32 token is wrong, or int8 is too far off.
    """
    answers: dict[str, Answers] = {}
    contestants: dict[str, Callable[[], float]] = {TRANSFORMERS: _timed(answer, TRANSFORMERS, answers)}
    for precision in (FP32, INT8):
        contestants[precision] = _timed(
            _engine(precision, settings, workload, model_dir, max_num_seqs), precision, answers
        )
    for name, contestant in contestants.items():
        settings.progress(f"ids, and warm-up: {name} {contestant():.4g}")
    agreements = {name: greedy_agreement(model, workload.prompts, answers[name]) for name in contestants}
    for name, agreement in agreements.items():
        settings.progress(f"{name}: {agreement}")
    require_same_ids(TRANSFORMERS, agreements[TRANSFORMERS])
    require_same_ids(FP32, agreements[FP32])
    if agreements[INT8].share_same < _LEAST_INT8_SHARE:
        raise BenchmarkError(f"int8 is far off: {agreements[INT8]}")
    samples = alternate(contestants, rounds=settings.rounds, warm_up=0, progress=settings.progress)
    num_equal = sum(a == b for a, b in zip(answers[TRANSFORMERS], answers[FP32], strict=True))
    notes = {
        FP32: f"{num_equal} of {len(workload.prompts)} answers equal to the last token, "
        f"{agreements[FP32].num_near_ties} near-ties chosen otherwise",
        INT8: f"{100 * agreements[INT8].share_same:.1f} % of tokens are fp32's choice",
    }
    results = [_result(goals[precision], precision, samples, notes[precision]) for precision in (FP32, INT8)]
    rates = [
        Result(
            goals.get(name, goals[FP32]).benchmark_id,
            f"{name}, output tokens/s",
            workload.num_output_tokens / samples.best(name),
        )
        for name in contestants
    ]
    return Outcome(
        (*results, *rates),
        raw={
            "seconds": samples.raw,
            "prompt_lens": [len(prompt) for prompt in workload.prompts],
            "max_tokens": workload.max_tokens,
            "agreement": {name: str(agreement) for name, agreement in agreements.items()},
        },
    )


def _engine(
    precision: str, settings: Settings, workload: Workload, model_dir: Path, max_num_seqs: int
) -> Callable[[], Answers]:
    parts = engine(
        EngineConfig(
            model=str(model_dir),
            max_num_seqs=max_num_seqs,
            max_model_len=max(map(len, workload.prompts)) + max(workload.max_tokens),
            enable_prefix_caching=False,  # every round has the same prompts
            quantization="int8" if precision == INT8 else None,
            threads=settings.threads,
        )
    )
    return lambda: serve(parts, workload.prompts, workload.max_tokens).output_ids


def _timed(answer: Callable[[], Answers], name: str, answers: dict[str, Answers]) -> Callable[[], float]:
    def measure() -> float:
        started_s = time.perf_counter()
        answers[name] = answer()
        return time.perf_counter() - started_s

    return measure


def _result(goal: Goal, precision: str, samples: Samples, note: str) -> Result:
    ratio = samples.ratio(TRANSFORMERS, precision)
    return Result(
        goal.benchmark_id,
        f"seconds, transformers fp32 over ours {precision}",
        ratio.best,
        "x",
        goal=goal.times_faster,
        note=f"{ratio.low:.2f}..{ratio.high:.2f}; {note}",
    )
