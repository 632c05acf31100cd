"""C16: overhead of a step outside the model: the scheduler and the packing of its batch.

Claim: planning a step, packing its tensors and processing its tokens takes little time compared with any model, with
many running requests and high churn.

Goal: with 256 running and 20 % churn, at most 0.5 ms per step.

Method: the real scheduler with prefix caching, request state and batch builder, which packs sampling parameters too; no
model, every row gets a token at once. Churn of 20 % means that a fifth of the requests ends in every step and as many
new ones, with prompts of 32 tokens, are admitted in the next; without churn all have a context of 256 tokens and
continue. A sample is the median time of a step, from adding the new requests to the outputs; sizes alternate. The note
gives the parts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from engine.core.config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.interfaces import execute
from engine.runner.batch import BatchBuilder
from engine.runner.request_state import PendingTokens, RequestState
from engine.runner.sampling_state import SamplingState

_SIZES = (1, 64, 256, 1024)
_GOAL_SIZE, _GOAL_MS = 256, 0.5
_LIFE_STEPS = 5  # churn of 20 %
_CHURN_PROMPT, _STEADY_PROMPT = 32, 256
_MAX_MODEL_LEN, _BLOCK_SIZE, _VOCAB_SIZE = 1024, 16, 32_000


class StepTimes(NamedTuple):
    """Medians over the steps of a run, in milliseconds; the parts need not add up to the whole."""

    step_ms: float
    add_ms: float
    schedule_ms: float
    pack_ms: float
    update_ms: float

    def __str__(self) -> str:
        return (
            f"add {self.add_ms:.3f}, schedule {self.schedule_ms:.3f}, pack {self.pack_ms:.3f}, "
            f"update {self.update_ms:.3f}"
        )


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
    """Measures all sizes with and without churn."""
    num_steps = 12 if settings.quick else 200
    sizes = (1, 8) if settings.quick else _SIZES
    times: dict[str, list[StepTimes]] = {}
    variants: dict[str, Callable[[], float]] = {}
    for size in sizes:
        for churn in (True, False):
            variants[_name(size, churn=churn)] = partial(_measure, size, num_steps, churn, times)
    samples = alternate(variants, rounds=settings.rounds, progress=settings.progress)
    times = {name: rounds[-settings.rounds :] for name, rounds in times.items()}  # without the warm-up
    results = [
        Result(
            "C16",
            name.removesuffix(", ms"),
            samples.best(name),
            "ms",
            goal=_GOAL_MS if name == _name(_GOAL_SIZE, churn=True) else None,
            direction="at most",
            note=str(min(times[name])),
        )
        for name in variants
    ]
    return Outcome(tuple(results), raw={"median_step_ms": samples.raw, "parts_ms": times})


def _name(num_running: int, *, churn: bool) -> str:
    return f"{num_running:,} running, {'20' if churn else '0'} % churn, ms"


def _measure(num_running: int, num_steps: int, churn: bool, times: dict[str, list[StepTimes]]) -> float:
    step_times = median_step(num_running, num_steps, churn=churn)
    times.setdefault(_name(num_running, churn=churn), []).append(step_times)
    return step_times.step_ms


def median_step(num_running: int, num_steps: int, *, churn: bool) -> StepTimes:
    """Returns medians over steps.

    Args:
        num_running: running requests.
        num_steps: measured steps, after as many steps as a request lives.
        churn: whether a fifth of the requests ends in every step and is replaced.
    """
    prompt_len = _CHURN_PROMPT if churn else _STEADY_PROMPT
    num_step_tokens = num_running * prompt_len
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_running * _MAX_MODEL_LEN // _BLOCK_SIZE,
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_running,
            max_num_batched_tokens=num_step_tokens,
            max_model_len=_MAX_MODEL_LEN,
        )
    )
    runner = PackingRunner(num_running, num_step_tokens)
    requests = arriving_requests(num_running, prompt_len, churn=churn)
    arriving = [next(requests) for _ in range(num_running)]
    marks_s = []
    for _ in range(_LIFE_STEPS + num_steps):
        started_s = time.perf_counter()
        for request in arriving:
            scheduler.add_request(request)
        added_s = time.perf_counter()
        plan = scheduler.schedule(added_s)
        scheduled_s = time.perf_counter()
        result = execute(runner, plan)
        packed_s = time.perf_counter()
        outputs = scheduler.update(plan, result, packed_s)
        marks_s.append((started_s, added_s, scheduled_s, packed_s, time.perf_counter()))
        assert len(outputs) == num_running, f"{len(outputs)} of {num_running} requests were in the step"
        arriving = [next(requests) for output in outputs if output.completion is not None]
    marks_ms = 1e3 * np.array(marks_s[_LIFE_STEPS:])  # [num_steps, 5]
    parts = np.median(np.diff(marks_ms, axis=1), axis=0)
    return StepTimes(float(np.median(marks_ms[:, -1] - marks_ms[:, 0])), *parts.tolist())


def arriving_requests(num_running: int, prompt_len: int, *, churn: bool) -> Iterator[Request]:
    """Requests with random prompts, without end. Under churn the first generation lives for 1 to 5 steps and all others
    for 5, so that a fifth ends in every step.
    """
    rng = np.random.default_rng(0)
    for index in count():
        max_tokens = _MAX_MODEL_LEN
        if churn:
            max_tokens = 1 + index % _LIFE_STEPS if index < num_running else _LIFE_STEPS
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_end_token=True)
        prompt = tuple(rng.integers(1, _VOCAB_SIZE, prompt_len).tolist())
        yield Request(RequestId(index + 1), prompt, params, arrival_s=0.0)
