"""Cases that no engine has run, for tests: an ideal engine that runs requests down step by step, and its client.

Its slots follow the same rules as `simulation` states, written once more: who runs in which step, by name.
"""

from collections.abc import Callable, Sequence

import numpy as np

from loadgen.experiments.batching.case_run import CaseRun, case_run_of
from loadgen.experiments.batching.cases import Case
from loadgen.experiments.batching.policies import CACHED, CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult
from loadgen.step_log import Step, Usage
from tests.support.loadgen.runs import Answered, run_of, workload_of

StepMs = Callable[[int], float]
"""Duration of a step by its number of rows."""


def engine_steps(
    usages: Sequence[Usage], num_slots: int, *, static: bool, step_ms: StepMs, first: int = 1
) -> list[Step]:
    """The steps of an engine whose prompts fit into one step. Requests are numbered from `first` on."""
    waiting = list(range(len(usages)))
    left: dict[int, int] = {}  # by request, tokens still to come
    steps, now_ms = [], 0.0
    while waiting or left:
        is_open = not (static and left)
        rows = {first + index: 1 for index in left}
        while is_open and waiting and len(left) < num_slots:
            index = waiting.pop(0)
            left[index] = usages[index].output
            rows[first + index] = usages[index].prompt - usages[index].cached
        done = [index for index in left if left[index] == 1]
        left = {index: tokens - 1 for index, tokens in left.items() if tokens > 1}
        finished = {first + index: usages[index] for index in done}
        busy_ms = step_ms(len(rows))
        steps.append(Step(now_ms, busy_ms, rows, finished, (), len(waiting), len(left)))
        now_ms += busy_ms
    return steps


def ideal_case_run(usages: Sequence[Usage], num_slots: int, *, static: bool, step_ms: StepMs) -> CaseRun:
    """What such an engine and a client that sees every token at once make of queued requests."""
    steps = engine_steps(usages, num_slots, static=static, step_ms=step_ms)
    ends_s = [(step.started_ms + step.busy_ms) / 1e3 for step in steps]
    answered = []
    for number, usage in enumerate(usages, 1):
        seen_s = [end_s for step, end_s in zip(steps, ends_s, strict=True) if number in step.rows]
        answered.append(Answered(0.0, tuple((at_s, 1) for at_s in seen_s), input_tokens=usage.prompt))
    return case_run_of(run_of(answered), 0, steps, num_slots)


def ideal_result(
    outputs: Sequence[int],
    num_slots: int,
    *,
    step_ms: StepMs = lambda rows: 2.0 + 0.1 * rows,
    noise: Sequence[float] = (1.0, 1.05),
    key: str = "ideal",
    cached: int = 0,
) -> CaseResult:
    """Every system runs answers of these lengths, once for each factor that its steps take longer."""
    usages = [Usage(32, 0, tokens) for tokens in outputs]
    known = [Usage(32, cached if number else 0, tokens) for number, tokens in enumerate(outputs)]
    rounds = {
        name: [
            ideal_case_run(
                known if name == CACHED else usages, num_slots, static=name == STATIC, step_ms=_slower(step_ms, factor)
            )
            for factor in noise
        ]
        for name in (STATIC, CONTINUOUS, CACHED)
    }
    trace = workload_of(np.zeros(len(outputs)), np.full(len(outputs), 32), np.asarray(outputs))
    return CaseResult(Case(key, f"{len(outputs)} answers", trace), rounds)


def _slower(step_ms: StepMs, factor: float) -> StepMs:
    return lambda rows: factor * step_ms(rows)
