"""C16: overhead of a step outside the model: the scheduler and the packing of its batch.

Claim: planning a step, packing its tensors and processing its tokens takes little time compared with any model, with
many running requests and high churn. Latency targets (policy `slo`) cost little more than first come first served.

Goals, with 256 running and 20 % churn: at most 0.5 ms per step under both policies; `schedule` and `update` under `slo`
take at most 1.2 times as long as under `fcfs`.

Method: the real scheduler with prefix caching, request state and batch builder, which packs sampling parameters too; no
model, every row gets a token at once. Churn of 20 % means that a fifth of the requests ends in every step and as many
new ones, with prompts of 32 tokens, are admitted in the next; without churn all have a context of 256 tokens and
continue. Under `slo` every request has both targets and meets them. The scheduler's clock is virtual, with equal steps,
so that decisions do not depend on the machine. A sample is the median time of a step, from adding the new requests to
the outputs; sizes and policies alternate. The note gives the parts, and what comes after the step: learning and
statistics.
"""

import time
from collections import deque
from functools import partial
from typing import NamedTuple

import numpy as np

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from engine.core.config import SchedulerConfig, SchedulingPolicyName
from engine.core.latency.step_time import Coefficients, StepTimePrior
from engine.core.latency.targets import LatencyTargets
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.schedulers import make_scheduler
from engine.interfaces import execute
from engine.runner.batch import BatchBuilder
from engine.runner.request_state import PendingTokens, RequestState
from engine.runner.sampling_state import SamplingState

_SIZES = (1, 64, 256, 1024)
_GOAL_SIZE, _GOAL_MS, _GOAL_RATIO = 256, 0.5, 1.2
_LIFE_STEPS = 5  # churn of 20 %
_CHURN_PROMPT, _STEADY_PROMPT = 32, 256
_MAX_MODEL_LEN, _BLOCK_SIZE, _VOCAB_SIZE = 1024, 16, 32_000
_STEP_S = 0.01  # of the virtual clock
_STEP_TIME = StepTimePrior(Coefficients(_STEP_S, 1e-9, 1e-9, 1e-12, 1e-12))
_TARGETS = LatencyTargets(ttft_s=1.0, inter_token_s=0.1)


class StepTimes(NamedTuple):
    """Medians over the steps of a run, in milliseconds; the parts need not add up to the whole.

    Attributes:
        step_ms: from adding the new requests to the outputs, without `after_ms`.
        schedule_update_ms: both together.
        after_ms: learning and statistics.
    """

    step_ms: float
    schedule_update_ms: float
    add_ms: float
    schedule_ms: float
    pack_ms: float
    update_ms: float
    after_ms: float

    def __str__(self) -> str:
        return (
            f"add {self.add_ms:.3f}, schedule {self.schedule_ms:.3f}, pack {self.pack_ms:.3f}, "
            f"update {self.update_ms:.3f}; after it {self.after_ms:.3f}"
        )


class Variant(NamedTuple):
    """What is measured: the number of running requests, whether a fifth is replaced in every step, and the policy."""

    num_running: int
    churn: bool
    policy: SchedulingPolicyName

    def __str__(self) -> str:
        return f"{self.policy}, {self.num_running:,} running, {'20' if self.churn else '0'} % churn"


class PackingRunner:
    """Does the work of the real runner before the model, and gives every sampling row the same token."""

    def __init__(self, num_running: int, num_step_tokens: int) -> None:
        sampling = SamplingState(max_num_seqs=num_running, vocab_size=_VOCAB_SIZE, end_token_ids=frozenset())
        self._state = RequestState(
            max_num_seqs=num_running, max_model_len=_MAX_MODEL_LEN, block_size=_BLOCK_SIZE, sampling=sampling
        )
        self._builder = BatchBuilder(
            max_num_seqs=num_running,
            max_num_batched_tokens=num_step_tokens,
            max_model_len=_MAX_MODEL_LEN,
            block_size=_BLOCK_SIZE,
        )
        self._packed: deque[tuple[SchedulerOutput, PendingTokens]] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """Packs the batch; see `engine.interfaces.ModelRunner.launch`."""
        self._state.apply(plan)
        batch = self._builder.build(plan, self._state)
        self._packed.append((plan, self._state.reserve_tokens(batch.columns.rows)))

    def collect(self) -> ModelRunnerOutput:
        """Takes in the tokens; see `engine.interfaces.ModelRunner.collect`."""
        plan, landing = self._packed.popleft()
        self._state.write_tokens(landing, np.ones(len(landing.rows), dtype=np.int64))
        return ModelRunnerOutput(plan.step, (1,) * len(plan.rows), {}, {})


def run(settings: Settings) -> Outcome:
    """Measures all sizes under `fcfs`, and the one of the goals under `slo`, with and without churn."""
    num_steps = 12 if settings.quick else 200
    sizes = (1, 8) if settings.quick else _SIZES
    goal_size = 8 if settings.quick else _GOAL_SIZE
    times: dict[str, list[StepTimes]] = {}
    variants: list[Variant] = []
    for size in sizes:
        for churn in (True, False):
            variants.append(Variant(size, churn, "fcfs"))
            if size == goal_size:
                variants.append(Variant(size, churn, "slo"))
    samples = alternate(
        {f"{variant}, ms": partial(_measure, variant, num_steps, times) for variant in variants},
        rounds=settings.rounds,
        progress=settings.progress,
    )
    times = {name: rounds[-settings.rounds :] for name, rounds in times.items()}  # without the warm-up
    results = [
        Result(
            "C16",
            str(variant),
            samples.best(f"{variant}, ms"),
            "ms",
            goal=_GOAL_MS if variant.num_running == _GOAL_SIZE and variant.churn else None,
            direction="at most",
            note=str(min(times[f"{variant}, ms"])),
        )
        for variant in variants
    ]
    results += [_ratio(goal_size, churn, times) for churn in (True, False)]
    return Outcome(tuple(results), raw={"median_step_ms": samples.raw, "parts_ms": times})


def _ratio(num_running: int, churn: bool, times: dict[str, list[StepTimes]]) -> Result:
    """Returns what `schedule` and `update` cost under `slo`, relative to `fcfs`."""
    slo, fcfs = (f"{Variant(num_running, churn, policy)}, ms" for policy in ("slo", "fcfs"))
    both = Samples({name: tuple(t.schedule_update_ms for t in times[name]) for name in (slo, fcfs)})
    ratio = both.ratio(slo, fcfs)
    return Result(
        "C16",
        f"schedule and update, slo over fcfs, {num_running:,} running, {'20' if churn else '0'} % churn",
        ratio.best,
        "x",
        goal=_GOAL_RATIO,
        direction="at most",
        note=f"{ratio.low:.2f} to {ratio.high:.2f} in one round; {both.best(slo):.3f} and {both.best(fcfs):.3f} ms",
    )


def _measure(variant: Variant, num_steps: int, times: dict[str, list[StepTimes]]) -> float:
    step_times = median_step(variant, num_steps)
    times.setdefault(f"{variant}, ms", []).append(step_times)
    return step_times.step_ms


def median_step(variant: Variant, num_steps: int) -> StepTimes:
    """Returns medians over steps.

    Args:
        variant: what runs.
        num_steps: measured steps, after as many steps as a request lives.
    """
    num_running = variant.num_running
    prompt_len = _CHURN_PROMPT if variant.churn else _STEADY_PROMPT
    num_step_tokens = num_running * prompt_len
    scheduler = make_scheduler(
        SchedulerConfig(
            num_blocks=num_running * _MAX_MODEL_LEN // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_step_tokens,
            max_model_len=_MAX_MODEL_LEN,
            policy=variant.policy,
            step_time=_STEP_TIME,
        )
    )
    runner = PackingRunner(num_running, num_step_tokens)
    arrivals = Arrivals(variant, prompt_len)
    arriving = arrivals.take(num_running, 0.0)
    marks_s = []
    for step in range(_LIFE_STEPS + num_steps):
        now_s = step * _STEP_S
        started_s = time.perf_counter()
        for request in arriving:
            scheduler.add_request(request)
        added_s = time.perf_counter()
        plan = scheduler.schedule(now_s)
        scheduled_s = time.perf_counter()
        result = execute(runner, plan)
        packed_s = time.perf_counter()
        outputs = scheduler.update(plan, result, now_s + _STEP_S)
        updated_s = time.perf_counter()
        scheduler.learn()
        scheduler.stats()
        marks_s.append((started_s, added_s, scheduled_s, packed_s, updated_s, time.perf_counter()))
        assert len(outputs) == num_running, f"{len(outputs)} of {num_running} requests were in the step"
        arriving = arrivals.take(sum(output.completion is not None for output in outputs), now_s + _STEP_S)
    marks_ms = 1e3 * np.array(marks_s[_LIFE_STEPS:])  # [num_steps, 6]
    parts = np.diff(marks_ms, axis=1)  # add, schedule, pack, update, after
    return StepTimes(
        float(np.median(marks_ms[:, 4] - marks_ms[:, 0])),
        float(np.median(parts[:, 1] + parts[:, 3])),
        *np.median(parts, axis=0).tolist(),
    )


class Arrivals:
    """Requests with random prompts, without end.

    Under churn the first generation lives for 1 to 5 steps and all others for 5, so that a fifth ends in every step.
    """

    def __init__(self, variant: Variant, prompt_len: int) -> None:
        self._variant, self._prompt_len = variant, prompt_len
        self._rng = np.random.default_rng(0)
        self._num_taken = 0

    def take(self, num_requests: int, now_s: float) -> list[Request]:
        """Returns the next requests, which arrive at `now_s`."""
        return [self._next(now_s) for _ in range(num_requests)]

    def _next(self, now_s: float) -> Request:
        num_running, churn, policy = self._variant
        max_tokens = _MAX_MODEL_LEN
        if churn:
            max_tokens = 1 + self._num_taken % _LIFE_STEPS if self._num_taken < num_running else _LIFE_STEPS
        self._num_taken += 1
        return Request(
            RequestId(self._num_taken),
            tuple(self._rng.integers(1, _VOCAB_SIZE, self._prompt_len).tolist()),
            SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_end_token=True),
            arrival_s=now_s,
            targets=_TARGETS if policy == "slo" else None,
        )
