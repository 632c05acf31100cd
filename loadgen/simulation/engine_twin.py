"""One engine in virtual time: the production scheduler, with a cost model in place of the runner.

`advance` follows `StepLoop.turn`: commands are applied between two steps, at most `max_steps_in_flight` steps are in
flight, the next one is planned as soon as the oldest one has ended, and a plan without rows collects everything before
it. Time of the host is not modelled apart: a fitted cost contains it, and two steps in flight hide it.
"""

import heapq
from array import array
from collections import deque
from typing import NamedTuple

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import shape_of
from engine.core.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.core.schedulers import make_scheduler
from engine.errors import RequestError
from loadgen.simulation.policies import PolicySpec
from loadgen.simulation.step_cost import StepTimer
from loadgen.simulation.workload import END_TOKEN, OTHER_TOKEN, Outcome, SimulatedRequest, targets_of

IDLE_POLL_S = 0.05
"""How long the step loop waits for a command if a plan had neither rows nor outputs, as `step_loop.IDLE_TURN_S`."""


class _Launched(NamedTuple):
    plan: SchedulerOutput
    seconds: float
    end_s: float


class EngineTwin:
    """An engine that serves simulated requests.

    Args:
        config: limits of the scheduler; its only end token is `END_TOKEN`.
        timer: durations of the steps.
        policy: how requests are made and when they are dropped.
        max_tokens: of every request; at least the longest answer, so that it tells nothing about any of them.

    Attributes:
        gaps_s: by class name, seconds between tokens of all its requests.
        num_steps, busy_s: steps with rows, and their seconds.
        num_prompt_tokens: tokens of prompts computed, of requests that were open when their step ended.
        ended: requests that ended since the list was last cleared.
        started: requests that got their first token since the list was last cleared.
    """

    def __init__(self, config: SchedulerConfig, timer: StepTimer, policy: PolicySpec, max_tokens: int) -> None:
        self._scheduler = make_scheduler(config)
        self._timer = timer
        self._policy = policy
        self._params = SamplingParams(seed=0, max_tokens=max_tokens)
        self._block_size = config.block_size
        self._inbox: list[SimulatedRequest] = []
        self._open: dict[RequestId, tuple[SimulatedRequest, Request]] = {}
        self._drop_at: list[tuple[float, RequestId]] = []  # heap: when waiting requests are dropped
        self._in_flight: deque[_Launched] = deque()
        self.gaps_s: dict[str, array[float]] = {}
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_prompt_tokens = 0
        self.ended: list[SimulatedRequest] = []
        self.started: list[SimulatedRequest] = []

    @property
    def scheduler(self) -> Scheduler:
        """The production scheduler that it drives."""
        return self._scheduler

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight, so that a submission must be followed by `advance`."""
        return not self._in_flight

    @property
    def num_free_tokens(self) -> int:
        """Free capacity of the KV cache."""
        return self._scheduler.stats().num_free_blocks * self._block_size

    def submit(self, request: SimulatedRequest) -> None:
        """Queues a request for the next turn of the step loop."""
        self._inbox.append(request)

    def advance(self, now_s: float) -> float | None:
        """Collects the steps that have ended, applies submissions, and launches the next steps.

        Returns: when to call again; None: not before a submission.
        """
        while True:
            was_productive = True
            while self._in_flight and self._in_flight[0].end_s <= now_s:
                was_productive = self._collect()
            if not (self._in_flight or was_productive or self._inbox):
                return now_s + IDLE_POLL_S if self._scheduler.has_work() else self._scheduler.next_deadline_s
            self._apply(now_s)
            while len(self._in_flight) < self._scheduler.max_steps_in_flight and self._is_due(now_s):
                if not self._launch(now_s):
                    break  # collected with the steps before it
            if not self._in_flight:
                return self._scheduler.next_deadline_s
            if self._in_flight[0].end_s > now_s:
                return self._in_flight[0].end_s

    def stop(self, now_s: float) -> None:
        """Ends what is open as unfinished."""
        for request, _ in self._open.values():
            request.end(Outcome.UNFINISHED, "end of the simulation", now_s)
        for request in self._inbox:
            request.end(Outcome.UNFINISHED, "end of the simulation", now_s)
        self._open.clear()
        self._inbox.clear()

    def _apply(self, now_s: float) -> None:
        for simulated in self._inbox:
            request = Request(
                RequestId(simulated.index),
                simulated.prompt_ids(),
                self._params,
                simulated.arrival_s,
                priority=self._policy.priority(simulated),
                targets=targets_of(simulated.service_class),
            )
            try:
                self._scheduler.add_request(request)
            except RequestError as error:
                simulated.end(Outcome.REFUSED, type(error).__name__, now_s)
                self.ended.append(simulated)
                continue
            self._open[request.request_id] = (simulated, request)
            if self._policy.has_queue_timeout and simulated.service_class.ttft_s is not None:
                drop_at_s = simulated.arrival_s + simulated.service_class.ttft_s
                heapq.heappush(self._drop_at, (drop_at_s, request.request_id))
        self._inbox.clear()
        while self._drop_at and self._drop_at[0][0] < now_s:
            request_id = heapq.heappop(self._drop_at)[1]
            entry = self._open.get(request_id)
            if entry is not None and entry[1].num_cached_tokens < 0:  # never admitted
                self._scheduler.cancel(request_id, now_s, EndReason.DEADLINE)

    def _is_due(self, now_s: float) -> bool:
        deadline_s = self._scheduler.next_deadline_s
        return self._scheduler.has_work() or (deadline_s is not None and deadline_s <= now_s)

    def _launch(self, now_s: float) -> bool:
        """Plans a step; returns whether it has rows."""
        plan = self._scheduler.schedule(now_s)
        begin_s = max(now_s, self._in_flight[-1].end_s) if self._in_flight else now_s
        if not plan.rows:
            self._in_flight.append(_Launched(plan, 0.0, begin_s))
            return False
        seconds = self._timer.seconds(shape_of(plan))
        self._in_flight.append(_Launched(plan, seconds, begin_s + seconds))
        return True

    def _collect(self) -> bool:
        """Ends the oldest step; returns whether it had rows or outputs."""
        plan, seconds, end_s = self._in_flight.popleft()
        open_requests = self._open
        token_ids = []
        for row in plan.rows:
            entry = open_requests.get(row.request_id)
            is_last = False
            if entry is not None:
                simulated = entry[0]
                num_prompt_tokens = min(row.num_scheduled_tokens, simulated.input_tokens - row.num_computed_tokens)
                if num_prompt_tokens > 0:
                    simulated.num_computed_tokens += num_prompt_tokens
                    self.num_prompt_tokens += num_prompt_tokens
                is_last = simulated.num_tokens + 1 >= simulated.output_tokens
            token_ids.append(-1 if not row.samples else END_TOKEN if is_last else OTHER_TOKEN)
        result = ModelRunnerOutput(plan.step, tuple(token_ids), {}, {})
        outputs = self._scheduler.update(plan, result, end_s)
        if plan.rows:
            self.num_steps += 1
            self.busy_s += seconds
        for output in outputs:
            self._take(output, end_s)
        return bool(plan.rows or outputs)

    def _take(self, output: RequestOutput, now_s: float) -> None:
        request = self._open[output.request_id][0]
        if output.token_ids:
            if request.num_tokens == 0:
                request.first_s = now_s
                request.num_cached_tokens = output.num_cached_tokens or 0
                self.started.append(request)
            else:
                gap_s = now_s - request.last_s
                gaps = self.gaps_s.get(request.service_class.name)
                if gaps is None:
                    gaps = self.gaps_s[request.service_class.name] = array("d")
                gaps.append(gap_s)
                inter_token_s = request.inter_token_s
                request.num_wide_gaps += gap_s > inter_token_s + 1e-9
                request.num_late_tokens += now_s > request.first_s + request.num_tokens * inter_token_s + 1e-9
            request.num_tokens += 1
            request.last_s = now_s
        if output.completion is not None:
            del self._open[output.request_id]
            reason = output.completion.reason
            outcome = Outcome.COMPLETED if reason.is_complete else Outcome.REFUSED
            request.end(outcome, reason.name, now_s)
            self.ended.append(request)
