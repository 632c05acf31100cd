"""The policy `slo`: plans every step by the latency targets of the requests.

Requests that can meet their targets are on time; all others are best effort. A step is planned in this order:

1. Running requests that need one token, as in every policy. The tightest of their targets bounds the step.
2. What this leaves of the step's time goes to prompts, in seconds (`step_budget.py`): those on time by their due times
   (earliest deadline first), with a guaranteed share for best effort.
3. If the prompts on time cannot all be in time, some are given up (`feasibility.py`): refused or made best effort.

Slots and blocks are kept in reserve for requests on time. Best effort is shared among tenants (`tenant_shares.py`).

With two steps in flight a step is planned while another one runs: it starts when that one is expected to end.

Every request makes progress, as in `scheduler.py`. If the head of the lane on time cannot start, the step admits no
other request. So it is with the head of best effort once it has waited long. Reserves hold only while others run.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.latency.answer_lengths import AnswerLengths
from engine.core.latency.feasibility import LatePrompt, Slots, WaitingPrompt, find_late
from engine.core.latency.lane_queue import LaneQueue, has_waited_long, pace
from engine.core.latency.pacing import MARGIN_DEVIATIONS, Lane, Slack, best_effort_key, note_tokens, slack_of
from engine.core.latency.policy import LatencyPolicy
from engine.core.latency.step_budget import MAX_SLACK_STEPS, StepBudget
from engine.core.latency.step_clock import StepClock
from engine.core.latency.step_time import StepShape, attention_pairs
from engine.core.latency.targets import WhenInfeasible
from engine.core.latency.tenant_shares import OUTPUT_TOKEN_CHARGE, TenantShares
from engine.core.outputs import (
    ModelRunnerOutput,
    RequestCompletion,
    RequestOutput,
    ScheduledRow,
    SchedulerOutput,
    SchedulerStats,
)
from engine.core.plan import PlanBuilder
from engine.core.request import Request, RequestId, RequestStatus
from engine.core.scheduler import Scheduler

_RUNNING, _FINISHED, _PREEMPTED = RequestStatus.RUNNING, RequestStatus.FINISHED, RequestStatus.PREEMPTED
_OF_BLOCKS = (0.05, 0.20)  # share of the blocks that an admission leaves free, by lane
_OF_SLOTS = 0.20  # the same of the slots, of best effort while it has its share of them
_ON_TIME_MEMORY_S = 30.0  # best effort may use everything if no request had targets for this long
_TURN_TOKENS = 256  # once its unused share has this many tokens, best effort goes first in a step
_MIN_CREDIT, _MAX_CREDIT = -1024.0, 8192.0
_MIN_TURN_CHUNK = 64
_MAX_PASSED = 64  # bounds the cost of a step
_MIN_CHECKED = 64  # first prompts of a queue whose feasibility any step may check
_CHECK_S = 50e-6  # between two checks of all, per prompt: a check takes 2 us per prompt on one core of an AMD EPYC
_SPEED_SAFETY = 0.95  # of what is promised; a prompt that takes all of its time would miss by milliseconds
_CHARGE_INTERVAL_S = 0.1  # of KV cache held by tenants
_ENDS_BY_TOKEN = (EndReason.END_TOKEN, EndReason.STOP_TOKEN, EndReason.MAX_TOKENS, EndReason.CONTEXT_FULL)


@dataclass(slots=True)
class _Turn:
    """What the lanes share while a step is filled.

    Attributes:
        num_kv_tokens: context of all running requests once their prompts are computed.
        num_passed: first requests on time in the queue that wait for their own inter-token targets; others pass them.
    """

    batch: PlanBuilder
    budget: StepBudget
    slack: Slack
    num_kv_tokens: int
    num_passed: int = 0


class LatencyScheduler(Scheduler):
    """A scheduler that meets latency targets; see the module.

    Use: as `Scheduler`; call `learn` while the next step runs.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.step_time is not None, "the policy slo needs a step-time prior"
        self._shares = TenantShares(config.tenant_weights)
        super().__init__(config, LatencyPolicy(config.max_num_seqs, self._shares))
        self._lanes = self._waiting = LaneQueue(self._shares)
        self._answers = AnswerLengths()
        self._clock = StepClock(config.step_time)
        self._model = self._clock.model
        # Holding the whole cache for a second is charged as much as the prompts that a second computes.
        self._charge_of_token_second = 1.0 / (config.step_time.coefficients.token_s * config.num_cache_tokens)
        self._num_ended = 0  # running requests, since the last step with rows
        self._charged_s = 0.0
        self._credit = 0.0  # tokens that best effort may have before requests on time
        self._on_time_until_s = float("-inf")
        self._is_unchecked = False  # requests on time arrived, or the first was late, since the last check of all
        self._next_check_s = float("-inf")
        self._prompts: list[Request] = []  # running, not computed when the last step was planned
        self._is_full = False  # the last step that was planned had no time or no tokens left for prompts
        self._slack: Slack | None = None
        self._num_kv_tokens = 0
        self._free_share = 0.0  # of the last step; see `StepBudget`
        self._num_infeasible = 0
        self._num_degraded = 0
        self._num_itl_infeasible = 0
        self._held_step = -1  # the last one that it counts

    def add_request(self, request: Request) -> None:
        """Queues a request; see `Scheduler.add_request`."""
        self._charge_kv_cache(request.arrival_s)  # a new tenant did not share the time before
        super().add_request(request)
        if request.is_finished or pace(request).lane is not Lane.ON_TIME:
            return
        self._is_unchecked = True
        self._on_time_until_s = request.arrival_s + _ON_TIME_MEMORY_S
        num_hits = self._cache.num_tokens_of(self._cache.get_computed_blocks(request))
        pace(request).num_uncached_tokens = request.num_tokens - num_hits
        pace(request).answer_s = self._answers.expected_s(request, self._model)

    def grant_credit(self, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """Lets a request generate more tokens; the time it was paused is not charged to its targets."""
        request = self._requests.get(request_id)
        credit = None if request is None else request.token_credit
        if request is not None and credit is not None and credit <= 0 < credit + num_tokens:
            # Without credit it is in no lane, so its key may change, whether it kept its blocks or not.
            state = pace(request)
            state.resume(now_s)
            if state.lane is Lane.ON_TIME and request.output_ids:
                state.key = now_s
        super().grant_credit(request_id, num_tokens, now_s)

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plans the next step; see `Scheduler.schedule`."""
        self._charge_kv_cache(now_s)
        self._prompts, self._is_full = [], False
        plan = super().schedule(now_s)
        num_pairs = 0
        for row in reversed(plan.rows):
            num_tokens = row.num_scheduled_tokens
            if num_tokens == 1:
                break
            num_pairs += attention_pairs(num_tokens, row.num_computed_tokens)
        shape = StepShape(plan.num_tokens, len(plan.rows), self._num_kv_tokens, num_pairs)
        has_backlog = (self._is_full and self._waiting.head is not None) or any(
            request.num_computed_tokens < request.num_tokens for request in self._prompts
        )
        self._clock.plan(shape, now_s, has_backlog=has_backlog)
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        """Applies the result of the oldest step in flight; see `Scheduler.update`."""
        requests = self._in_flight[0][1]
        outputs = super().update(plan, result, now_s)
        self._clock.collect(now_s, self._num_ended)
        if requests:
            self._num_ended = 0
            self._note_tokens(requests, plan.rows, now_s)
        return outputs

    def learn(self) -> None:
        """Corrects the step-time model by the last step that was collected, if that has not happened yet."""
        self._clock.learn()

    def stats(self) -> SchedulerStats:
        """Current load and totals since start."""
        stats = super().stats()
        errors = self._model.errors
        num_on_time = self._lanes.num_on_time_tokens + sum(num for _, num in self._running_on_time())
        slack = self._slack
        is_busy = self._clock.has_steps or self.has_work()
        pace_now = (self._now_s, self._free_share) if is_busy else (float("inf"), 1.0)  # idle: nothing is measured
        return replace(
            stats,
            prompt_tokens_per_s=self._clock.prompt_tokens_per_s(*pace_now),
            model_coefficients=self._model.coefficients,
            on_time_tokens=num_on_time,
            best_effort_tokens=stats.num_waiting_prefill_tokens - num_on_time,
            min_slack_s=slack.min_slack_s if slack and self._running and slack.min_slack_s < float("inf") else None,
            num_stalls=errors.num_stalls,
            step_time_errors=errors,
            num_infeasible_total=self._num_infeasible,
            num_degraded_total=self._num_degraded,
            num_itl_infeasible_total=self._num_itl_infeasible,
        )

    def _schedule_prompts(self, batch: PlanBuilder, prompts: list[Request]) -> None:
        """Gives the rest of the step's time to prompts, by lane and within it by key; best effort first on its turn."""
        start_s = self._clock.start_s(self._now_s)
        rows = batch.narrow_requests
        if_gap, if_paced = (self._model.margin(deviations) for deviations in MARGIN_DEVIATIONS)
        slack = slack_of(rows, start_s, is_ahead=self._clock.has_steps, margins=(if_gap, if_paced))
        self._slack = slack
        self._num_kv_tokens = slack.num_kv_tokens
        max_step_s = self._config.max_step_s
        allowed_s = min(slack.allowed_s, MAX_SLACK_STEPS * max_step_s) if slack.allowed_s < float("inf") else max_step_s
        budget = StepBudget(self._model, len(rows), slack.num_kv_tokens, allowed_s / self._clock.drift)
        self._free_share = budget.free_share
        prompts = [request for request in prompts if request.status is _RUNNING]
        self._prompts = prompts
        self._give_up_late(start_s, budget)
        on_time = sorted((r for r in prompts if pace(r).lane is Lane.ON_TIME), key=lambda request: pace(request).key)
        best_effort = [request for request in prompts if pace(request).lane is Lane.BEST_EFFORT]
        num_kv_tokens = slack.num_kv_tokens + sum(request.num_tokens for request in prompts)
        turn = _Turn(batch, budget, slack, num_kv_tokens)
        if not best_effort and self._lanes.first(Lane.BEST_EFFORT) is None:
            self._credit = 0.0
            self._fill(turn, Lane.ON_TIME, on_time)
        elif self._credit >= _TURN_TOKENS:
            left = self._fill(turn, Lane.BEST_EFFORT, best_effort, max_tokens=int(self._credit))
            self._fill(turn, Lane.ON_TIME, on_time)
            self._fill(turn, Lane.BEST_EFFORT, left)
        else:
            self._fill(turn, Lane.ON_TIME, on_time)
            self._fill(turn, Lane.BEST_EFFORT, best_effort)
        self._is_full = batch.budget <= 0 or budget.is_spent

    def _fill(self, turn: _Turn, lane: Lane, prompts: list[Request], max_tokens: int | None = None) -> list[Request]:
        """Schedules chunks of a lane: running prompts and, by their keys among them, waiting requests.

        Returns: the running prompts that were not reached.
        """
        batch, budget = turn.batch, turn.budget
        index = num_tokens = 0
        may_admit = True
        while batch.budget > 0 and not budget.is_spent and (max_tokens is None or num_tokens < max_tokens):
            request = prompts[index] if index < len(prompts) else None
            head = self._head(lane, turn) if may_admit and batch.may_admit else None
            if head is not None and (request is None or (lane is Lane.ON_TIME and pace(head).key < pace(request).key)):
                if lane is Lane.ON_TIME and self._is_held_by_gap(head, turn):
                    if pace(head).gap_s < turn.slack.min_gap_s and turn.num_passed < _MAX_PASSED:
                        turn.num_passed += 1
                    else:
                        may_admit = False
                    continue
                if not self._may_start(head, lane, turn) or not self._try_admit(head, batch):
                    may_admit = False
                    if lane is Lane.ON_TIME or has_waited_long(head, self._now_s):
                        batch.may_admit = False  # the other lane would take what this one waits for
                    continue
                self._prompts.append(head)
                turn.num_kv_tokens += head.num_tokens
                request = head
            elif request is not None:
                index += 1
                if request.status is not _RUNNING:
                    continue  # preempted for the chunk of another
            else:
                break
            limit = budget.max_chunk(request.num_computed_tokens)
            if max_tokens is not None:
                limit = min(limit, max(_MIN_TURN_CHUNK, max_tokens - num_tokens))
            num_computed = request.num_computed_tokens
            chunk = self._add_chunk(request, batch, max(1, limit))
            if chunk == 1:
                self._num_kv_tokens += request.num_computed_tokens
            budget.spend(chunk, num_computed)
            num_tokens += chunk
            if self._shares.is_shared:
                self._shares.charge(request.tenant, chunk)
        credit = self._credit + self._config.best_effort_share * num_tokens
        if lane is Lane.BEST_EFFORT:
            credit -= num_tokens
        self._credit = max(_MIN_CREDIT, min(_MAX_CREDIT, credit))
        return prompts[index:]

    def _head(self, lane: Lane, turn: _Turn) -> Request | None:
        """The next request of a lane, behind those that others pass."""
        if lane is Lane.BEST_EFFORT or not turn.num_passed:
            return self._lanes.first(lane)
        queue = self._lanes.on_time
        return queue[turn.num_passed][2] if turn.num_passed < len(queue) else None

    def _may_start(self, request: Request, lane: Lane, turn: _Turn) -> bool:
        """Whether slots and reserves let the head of a lane run."""
        config, num_running = self._config, len(self._running)
        if num_running >= config.max_num_seqs:
            return False
        if self._is_alone(turn):
            return True
        is_reserved = lane is Lane.BEST_EFFORT and self._now_s < self._on_time_until_s
        has_share_only = is_reserved and num_running >= (1.0 - _OF_SLOTS) * config.max_num_seqs
        if has_share_only or (lane is Lane.BEST_EFFORT and self._exceeds_gap(request, turn.slack.min_gap_s, turn)):
            num_best_effort = sum(pace(other).lane is Lane.BEST_EFFORT for other in self._running.values())
            if num_best_effort >= config.best_effort_share * config.max_num_seqs:
                return False
        share = _OF_BLOCKS[Lane.BEST_EFFORT if is_reserved else Lane.ON_TIME]
        return self._cache.leaves_free(request, share * config.num_blocks)

    def _is_alone(self, turn: _Turn) -> bool:
        """Whether nothing but the next request would make progress."""
        return not turn.batch.num_tokens and not self._cache.pool.has_steps_in_flight

    def _is_held_by_gap(self, request: Request, turn: _Turn) -> bool:
        """Whether an inter-token target, of the rows or its own, keeps a request on time waiting.

        If its own target is tighter than those of the rows, others of its lane pass it. Otherwise they would wait until
        few enough requests run, which may take as long as their answers. It is given up when its first token is late,
        like any other. A request in the middle of its answer starts without this check.
        """
        is_full = len(self._running) >= self._config.max_num_seqs
        if is_full or not self._exceeds_gap(request, min(pace(request).gap_s, turn.slack.min_gap_s), turn):
            return False
        if self._held_step != self._step:
            self._held_step = self._step
            self._num_itl_infeasible += 1
        return True

    def _exceeds_gap(self, request: Request, gap_s: float, turn: _Turn) -> bool:
        """Whether decoding with a row more, of a request that has not begun, would take longer than a gap."""
        if gap_s == float("inf") or request.output_ids or self._is_alone(turn):
            return False
        num_rows = len(self._running) + 1
        return self._model.predict_s(StepShape(num_rows, num_rows, turn.num_kv_tokens + request.num_tokens, 0)) > gap_s

    def _give_up_late(self, start_s: float, budget: StepBudget) -> None:
        """Refuses requests on time, or makes them best effort, if not all can be in time; see `feasibility.py`."""
        queue = self._lanes.on_time
        if not queue:
            return
        speed, step_s = self._clock.expected_pace(self._now_s, self._config.max_step_s, budget.free_share)
        speed *= _SPEED_SAFETY
        if self._lanes.first(Lane.BEST_EFFORT) is not None:
            speed *= 1.0 - self._config.best_effort_share
        # A first token comes at the end of a step.
        free_s = start_s + step_s + self._running_on_time_s() / speed
        head = queue[0][2]
        self._is_unchecked |= free_s + self._prompt_s(head) / speed > pace(head).due_s
        if not self._is_unchecked:
            return
        if len(queue) <= _MIN_CHECKED or self._now_s >= self._next_check_s:
            self._is_unchecked, self._next_check_s = False, self._now_s + _CHECK_S * len(queue)
        else:
            queue = queue[:_MIN_CHECKED]
        num_free_slots = self._config.max_num_seqs - len(self._running)
        works_s = [self._prompt_s(request) for _, _, request in queue]
        if len(queue) <= num_free_slots and free_s + sum(works_s) / speed <= pace(head).due_s:
            return  # all are in time even for the first due time
        slots = Slots(num_free_slots, self._clock.ends_per_s)
        prompts = [
            _waiting_prompt(request, work_s, speed, self._shares)
            for (_, _, request), work_s in zip(queue, works_s, strict=True)
        ]
        late = [(queue[given_up.position][2], given_up) for given_up in find_late(prompts, self._now_s, free_s, slots)]
        for request, given_up in late:
            self._give_up(request, given_up)

    def _give_up(self, request: Request, late: LatePrompt) -> None:
        state = pace(request)
        if state.when_infeasible is WhenInfeasible.REFUSE and not request.has_moved:
            self._num_infeasible += 1
            waited_s, now_s = self._now_s - request.arrival_s, self._now_s
            self._finish_now(
                request,
                EndReason.INFEASIBLE,
                f"the first token is due in {max(0.0, state.due_s - now_s):.3f} s, expected in "
                f"{late.expected_s - now_s:.3f} s; the request has waited {waited_s:.3f} s",
            )
            return
        self._num_degraded += state.when_infeasible is WhenInfeasible.DEGRADE
        self._waiting.remove(request)
        state.miss()
        state.key = best_effort_key(request)
        self._waiting.push(request)

    def _preempt(self, request: Request, batch: PlanBuilder) -> None:
        pace(request).num_uncached_tokens = request.num_tokens - self._cache.num_published_tokens(request)
        self._set_key_of_preempted(request)
        super()._preempt(request, batch)

    def _set_key_of_preempted(self, request: Request) -> None:
        """Places a preempted request; call it while it is not queued."""
        state = pace(request)
        if state.lane is Lane.BEST_EFFORT:
            state.key = best_effort_key(request)
        elif request.output_ids:
            state.key = min(state.next_due_s, self._now_s)

    def _finish(self, request: Request, reason: EndReason, detail: str = "") -> RequestCompletion:
        if request.request_id in self._running:
            self._num_ended += 1
            if reason in _ENDS_BY_TOKEN and self._shares.is_shared:
                self._shares.charge(request.tenant, OUTPUT_TOKEN_CHARGE)  # of its last token
        if request.output_ids:
            self._answers.note(request, is_complete=reason in _ENDS_BY_TOKEN)
        return super()._finish(request, reason, detail)

    def _note_tokens(self, requests: Iterable[Request], rows: Iterable[ScheduledRow], now_s: float) -> None:
        """Judges the tokens of a step and charges them."""
        sampled = _sampled(requests, rows) if self._shares.is_shared or len(self._lanes) else []
        preempted = [request for request in sampled if request.status is _PREEMPTED]
        for request in preempted:
            self._waiting.remove(request)  # its token may change its place
        note_tokens(requests, rows, now_s)
        for request in preempted:
            self._set_key_of_preempted(request)
            self._waiting.push(request)
        if self._shares.is_shared:
            for tenant, num_tokens in Counter(request.tenant for request in sampled).items():
                self._shares.charge(tenant, OUTPUT_TOKEN_CHARGE * num_tokens)

    def _charge_kv_cache(self, now_s: float) -> None:
        """Charges tenants for the cache they hold."""
        elapsed_s = now_s - self._charged_s
        if elapsed_s < _CHARGE_INTERVAL_S:
            return
        self._charged_s = now_s
        if self._shares.is_shared:
            charge = self._charge_of_token_second * elapsed_s
            for request in self._running.values():
                self._shares.charge(request.tenant, charge * request.num_computed_tokens)

    def _prompt_s(self, request: Request) -> float:
        """Device time of what a waiting request must compute before its next token."""
        num_tokens = pace(request).num_uncached_tokens
        return self._model.prompt_s(num_tokens, attention_pairs(num_tokens, request.num_tokens - num_tokens))

    def _running_on_time_s(self) -> float:
        """Device time that the running prompts on time still take."""
        return sum(
            self._model.prompt_s(num_missing, attention_pairs(num_missing, request.num_computed_tokens))
            for request, num_missing in self._running_on_time()
        )

    def _running_on_time(self) -> Iterator[tuple[Request, int]]:
        """Yields running prompts on time with the tokens they miss."""
        for request in self._prompts:
            num_missing = request.num_tokens - request.num_computed_tokens
            if request.status is _RUNNING and pace(request).lane is Lane.ON_TIME and num_missing > 1:
                yield request, num_missing


def _sampled(requests: Iterable[Request], rows: Iterable[ScheduledRow]) -> list[Request]:
    """Returns the requests that got a token in a step and have not ended."""
    pairs = zip(requests, rows, strict=True)
    return [request for request, row in pairs if row[4] and request.status is not _FINISHED]  # row.samples


def _waiting_prompt(request: Request, work_s: float, speed: float, shares: TenantShares) -> WaitingPrompt:
    state = pace(request)
    return WaitingPrompt(
        state.due_s,
        work_s / speed,
        state.value,
        shares.is_over_share(request.tenant),
        must_stay=bool(request.output_ids),
        cost_s=work_s + state.answer_s,
    )
