"""The policy `slo` in virtual time: steps take what a cost model says, and no test reads a clock."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior, shape_of
from engine.core.latency.targets import LatencyTargets, WhenInfeasible
from engine.core.outputs import ModelRunnerOutput, RequestCompletion, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.schedulers import make_scheduler

H200 = StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), knee_tokens=205)
predict_s = StepTimeModel(H200).predict_s
REFUSE, DEGRADE, WAIT = WhenInfeasible.REFUSE, WhenInfeasible.DEGRADE, WhenInfeasible.WAIT


class World:
    """A scheduler whose steps take the time of a cost model; records when tokens come and what steps compute."""

    def __init__(
        self,
        cost: Callable[[StepShape], float] = predict_s,
        prior: StepTimePrior = H200,
        **limits: Any,
    ) -> None:
        values = {
            "num_blocks": 4000,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "max_model_len": 16_384,
            "policy": "slo",
            "step_time": prior,
            **limits,
        }
        self.scheduler = make_scheduler(SchedulerConfig(**values))
        self.cost = cost
        self.now_s = 0.0
        self.in_flight: deque[tuple[SchedulerOutput, float]] = deque()  # when it ends
        self.requests: dict[int, Request] = {}
        self.times_s: dict[int, list[float]] = {}
        self.ends: dict[int, RequestCompletion] = {}
        self.ended_s: dict[int, float] = {}
        self.steps: list[tuple[float, StepShape, SchedulerOutput]] = []  # durations

    def add(self, request_id: int, prompt: int, max_tokens: int = 1, **fields: Any) -> Request:
        names = LatencyTargets.__dataclass_fields__.keys() & fields.keys()
        targets = LatencyTargets(**{name: fields.pop(name) for name in names}) if names else None
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_end_token=True)
        token = fields.pop("token", request_id + 1)
        arrival_s = fields.pop("arrival_s", self.now_s)
        request = Request(RequestId(request_id), (token,) * prompt, params, arrival_s, targets=targets, **fields)
        self.requests[request_id], self.times_s[request_id] = request, []
        self.scheduler.add_request(request)
        return request

    def step(self) -> Counter[int]:
        """Plans a step, and ends the oldest one in flight if no further one may be planned; prompt tokens by id."""
        plan = self.scheduler.schedule(self.now_s)
        start_s = max(self.now_s, self.in_flight[-1][1]) if self.in_flight else self.now_s
        duration_s = self.cost(shape_of(plan)) if plan.rows else 0.0
        self.steps.append((duration_s, shape_of(plan), plan))
        self.in_flight.append((plan, start_s + duration_s))
        self.scheduler.learn()
        if len(self.in_flight) == self.scheduler.max_steps_in_flight or not plan.rows:
            while len(self.in_flight) >= self.scheduler.max_steps_in_flight or (self.in_flight and not plan.rows):
                self.collect()
        if len(self.steps) % 50 == 0:
            self.scheduler.check_integrity()
        return Counter({row.request_id: row.num_scheduled_tokens for row in plan.rows})

    def collect(self) -> None:
        plan, self.now_s = self.in_flight.popleft()
        result = ModelRunnerOutput(plan.step, tuple(1 if row.samples else -1 for row in plan.rows), {}, {})
        for output in self.scheduler.update(plan, result, self.now_s):
            if output.token_ids:
                self.times_s[output.request_id].append(self.now_s)
            if output.completion is not None:
                self.ends[output.request_id] = output.completion
                self.ended_s[output.request_id] = self.now_s

    def run(self, arrivals: Iterable[tuple[float, Callable[[], object]]] = (), until_s: float = math.inf) -> None:
        """Steps until there is nothing to do; calls each arrival when its time has come, between two steps."""
        waiting = deque(sorted(arrivals, key=lambda arrival: arrival[0]))
        for _ in range(200_000):
            while waiting and waiting[0][0] <= self.now_s:
                waiting.popleft()[1]()
            if self.now_s >= until_s:
                return
            if self.scheduler.has_work() or self.in_flight:
                self.step()
            elif waiting:
                self.now_s = waiting[0][0]
            else:
                return
        raise AssertionError(f"work is left at {self.now_s} s: {self.scheduler.stats()}")

    def ttft_s(self, request_id: int) -> float:
        return self.times_s[request_id][0] - self.requests[request_id].arrival_s

    def gaps_s(self, request_id: int) -> list[float]:
        times_s = self.times_s[request_id]
        return [late - early for early, late in pairwise(times_s)]

    def reason(self, request_id: int) -> EndReason:
        return self.ends[request_id].reason


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * len(ordered))]


def random_arrivals(rate: float, duration_s: float, add: Callable[[int, float], object]) -> list[Any]:
    """Poisson arrivals: `add(number, time)` is called for each."""
    arrivals: list[Any] = []
    rng, now_s = random.Random(0), 0.0
    while (now_s := now_s + rng.expovariate(rate)) < duration_s:
        arrivals.append((now_s, partial(add, len(arrivals), now_s)))
    return arrivals


def overload(world: World, rate: float = 40.0, duration_s: float = 10.0) -> list[Any]:
    """Requests of 1,000 tokens on time, of which 46 a second fill the device."""
    return random_arrivals(
        rate,
        duration_s,
        lambda n, at_s: world.add(n, 1000, ttft_s=0.4, when_infeasible=REFUSE, arrival_s=at_s),
    )
