"""Decides which tokens of which requests are computed in each step.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and `num_tokens`, and each step
assigns tokens so that the first catches up with the second. Running requests that need one token are scheduled first;
longer prompts then share the remaining token budget in chunks, so that a long prompt does not stall running requests.
The scheduler reads no clock (time is passed in) and knows no text, tensors or sockets.

Every request makes progress:

- If blocks run out, the scheduler preempts, among the running requests of least priority, the one that loses the
  fewest computed tokens; this may be the request that needs the block. Preemptions of one request are bounded by
  `max_preemptions`.
- A request at that bound is resumed only when the cache has blocks for its maximum length. It needs no more blocks
  afterwards.
- No request overtakes the head of the queue while it waits for blocks. The head fits at the latest when nothing runs:
  a request that does not fit in the empty cache is rejected.
- Paused requests keep their blocks while any other request can run; otherwise they are preempted even past
  `max_preemptions`.

Steps in flight in different pipeline stages (`num_stages`) are kept apart: a request whose sample is in flight has no
row and is not preempted, and a step takes its share of the one-token rows. Chunks of one prompt follow each other.
"""

from collections import deque
from collections.abc import Sequence

from chairlift.service.end_reason import EndReason
from engine.core.cache_events import CacheEvent
from engine.core.config import SchedulerConfig, check_config
from engine.core.deadlines import Deadlines
from engine.core.kv_cache_manager import make_cache
from engine.core.lifecycle import (
    charge_time,
    check_prompt,
    check_requests,
    completion_of,
    completion_output,
    finish_reason,
    prompt_output,
    take_time_news,
)
from engine.core.outputs import (
    ModelRunnerOutput,
    RequestCompletion,
    RequestOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from engine.core.plan import PlanBuilder
from engine.core.policy import SchedulingPolicy, choose_victim, make_policy
from engine.core.request import BlockId, Request, RequestId, RequestStatus
from engine.core.totals import Totals
from engine.core.waiting_queue import WaitingQueue
from engine.errors import IntegrityError, InvalidRequest, QueueFull

_RUNNING, _PREEMPTED, _FINISHED = RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED


class Scheduler:
    """Continuous batching over a paged, prefix-cached KV cache.

    Use: `plan = schedule(now_s)`, run it, `outputs = update(plan, result, now_s)`. With two steps in flight, the next
    plan may be scheduled before the last one is updated; updates follow the order of the plans. Request ids are unique.

    Invariants: until it finishes, every accepted request is either running (with a block table) or waiting. It yields
    exactly one completion, as its last output. Row and token counts of `Request` agree with the plans in flight.
    """

    def __init__(self, config: SchedulerConfig, policy: SchedulingPolicy | None = None) -> None:
        check_config(config)
        self._config = config
        self._policy = policy or make_policy(config)
        self._cache = make_cache(config)
        self._requests: dict[RequestId, Request] = {}
        self._running: dict[RequestId, Request] = {}  # in the order of admission
        self._waiting = WaitingQueue(self._policy.order_key)
        self._deadlines = Deadlines()
        self._in_flight: deque[tuple[int, list[Request]]] = deque()  # per plan, the requests of its rows
        self._removed: list[RequestId] = []  # requests that the next plan removes from the runner
        self._outputs: list[RequestOutput] = []  # completions that the next update returns
        self._step = 0
        self._now_s = 0.0
        self._num_accepted = 0
        self._totals = Totals()

    @property
    def config(self) -> SchedulerConfig:
        """The limits and the policy in use."""
        return self._config

    def add_request(self, request: Request) -> None:
        """Queues a request.

        A request whose output is already complete, or whose time budget is used up, completes with the next update
        without running.

        Raises:
            InvalidRequest, RequestTooLong: the id is in use, or see `check_prompt`.
            QueueFull: `max_waiting` requests wait, and the session has its share of them. Requests that moved here
                from a lost engine are exempt: they were accepted before.
        """
        config = self._config
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is in use")
        check_prompt(request.num_prompt_tokens, config)
        request.max_num_tokens = min(request.num_prompt_tokens + request.params.max_tokens, config.max_model_len)
        reason = finish_reason(request, config.end_token_ids)
        if reason is None and request.budget_end_s is not None and request.budget_end_s <= request.arrival_s:
            reason = EndReason.TIME_BUDGET
        is_bounded = reason is None and not request.has_moved
        if is_bounded and not self._waiting.has_capacity(request.session, config.max_waiting):
            raise QueueFull(f"{len(self._waiting)} requests wait, max_waiting is {config.max_waiting}")
        request.arrival_index = self._num_accepted
        self._num_accepted += 1
        self._requests[request.request_id] = request
        self._policy.arrive(request)
        self._waiting.push(request)
        if reason is not None:
            self._finish_now(request, reason)
        else:
            self._deadlines.add(request)

    def cancel(self, request_id: RequestId, now_s: float, reason: EndReason = EndReason.CANCELLED) -> None:
        """Ends a request now; its completion leaves with the next update. An unknown or finished id is ignored."""
        if (request := self._requests.get(request_id)) is not None:
            self._now_s = now_s
            self._finish_now(request, reason)

    def grant_credit(self, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """Lets a request generate `num_tokens` more tokens. The first grant makes an unlimited request limited."""
        if (request := self._requests.get(request_id)) is None:
            return
        charge_time(request, now_s)
        request.has_time_news |= request.token_credit is not None and request.token_credit <= 0
        is_waiting = request_id not in self._running
        if is_waiting:
            self._waiting.remove(request)
        request.token_credit = (request.token_credit or 0) + num_tokens
        if is_waiting:
            self._waiting.push(request)
        else:
            request.status = RequestStatus.PAUSED if request.token_credit <= 0 else _RUNNING

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Plans the next step.

        Args:
            now_s: monotonic seconds; requests past their deadline or time budget end here.
        Returns: the plan. A plan without rows needs an `update` too.
        """
        assert len(self._in_flight) < self._config.max_steps_in_flight, f"{len(self._in_flight)} steps are in flight"
        self._now_s = now_s
        for request_id, reason in self._deadlines.pop_due(now_s):
            self._finish_now(self._requests[request_id], reason)
        batch = PlanBuilder(self._config.max_num_batched_tokens, self._config.max_num_seqs)
        self._schedule_prompts(batch, self._schedule_decodes(batch))
        while batch.num_tokens == 0 and self._waiting.head is not None and self._only_paused_requests_run():
            self._preempt(choose_victim(self._running.values(), self._policy, self._cache), batch)
            batch.may_admit = True
            self._schedule_prompts(batch, [])
        self._step += 1
        plan, requests = batch.build(self._step, self._removed, self._cache.save_states(batch.saves))
        self._removed.clear()
        self._in_flight.append((plan.step, requests))
        if requests:
            self._cache.pool.begin_step(plan.step)
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        """Applies the result of the oldest step in flight.

        Args:
            plan: the plan of that step.
            result: the runner's result for that plan.
            now_s: monotonic seconds.
        Returns: new tokens and completions; completions since the last update come first.
        """
        step, requests = self._in_flight.popleft()
        assert step == plan.step == result.step, f"step {result.step} for plan {plan.step}, expected step {step}"
        self._now_s = now_s
        if requests:
            self._cache.pool.end_step(step)
        outputs, self._outputs = self._outputs, []
        block_size = self._config.block_size
        failures, all_logprobs = result.failures, result.logprobs
        for state in plan.saved_states:
            self._cache.states.end(state.snapshot, is_kept=state.request_id in self._requests and not failures)
        for index, (request, row, token_id) in enumerate(zip(requests, plan.rows, result.token_ids, strict=True)):
            request.num_rows_in_flight -= 1
            status = request.status
            if status is _FINISHED:
                continue  # cancelled, or finished by an earlier row: drop the token
            if index in failures:
                outputs.append(
                    completion_output(request, self._finish(request, EndReason.ENGINE_ERROR, failures[index]))
                )
                continue
            _, num_tokens, num_computed, _, samples, num_prompt_logits = row
            if status is not _PREEMPTED:
                num_completed = num_computed + num_tokens
                if num_tokens > 1 or num_completed % block_size == 0:
                    self._cache.complete(request, num_completed)
            if num_prompt_logits:
                outputs.append(prompt_output(request, row, result.prompt_logprobs[index]))
            if samples:
                assert token_id >= 0, f"row {index} of step {step} sampled no token and did not fail"
                logprobs = (all_logprobs[index],) if index in all_logprobs else ()
                outputs.append(self._accept_token(request, token_id, logprobs))
        return outputs

    def learn(self) -> None:
        """Learns from the last update, if the policy learns. Call it off the critical path, while a step runs."""

    @property
    def max_steps_in_flight(self) -> int:
        """Plans that may be scheduled before the first one is updated."""
        return self._config.max_steps_in_flight

    def has_work(self) -> bool:
        """Whether `schedule` should be called before the next command or deadline; steps in flight do not count."""
        if self._outputs or self._waiting.head is not None:
            return True
        return any(one.status is _RUNNING and not self._waits_for_sample(one) for one in self._running.values())

    @property
    def next_deadline_s(self) -> float | None:
        """When `schedule` must be called at the latest, even without work; None: no deadline."""
        return self._deadlines.next_s

    def stats(self) -> SchedulerStats:
        """Current load and totals since start."""
        return self._totals.stats(self._running.values(), self._waiting, self._cache, self._config)

    def take_cache_events(self) -> tuple[CacheEvent, ...]:
        """Returns what entered and left the prefix cache since the last call, if the configuration records it."""
        return self._cache.take_events()

    def check_integrity(self) -> None:
        """Checks that queues, block tables and plans in flight agree.

        Raises: IntegrityError: an inconsistency, with the request and the numbers.
        """
        running, waiting = list(self._running.values()), list(self._waiting)
        self._cache.check_integrity(running, waiting)
        rows_in_flight = [request for _, requests in self._in_flight for request in requests]
        check_requests(self._requests.values(), running, waiting, rows_in_flight)
        if len(running) > self._config.max_num_seqs:
            raise IntegrityError(f"{len(running)} requests run, max_num_seqs is {self._config.max_num_seqs}")
        self._waiting.check_integrity()

    def _schedule_decodes(self, batch: PlanBuilder) -> list[Request]:
        """Schedules running requests that need one token, in admission order; returns those that need more.

        Most rows need no new block: they are scheduled without a call to the cache.
        """
        prompts = []
        num_stages = self._config.num_stages
        num_kept = max(0, batch.budget - -(-len(self._running) // num_stages)) if num_stages > 1 else 0
        for request in list(self._running.values()):
            if request.status is not _RUNNING:
                continue
            num_pending = request.num_pending_tokens
            num_wanted = len(request.prompt_ids) + len(request.output_ids) + num_pending
            if num_wanted - request.num_computed_tokens > 1:
                prompts.append(request)
                continue
            if num_pending and (num_stages > 1 or num_wanted >= request.max_num_tokens):
                continue  # the sample in flight is in another stage, or is its last token
            credit = request.token_credit
            if credit is not None and credit <= num_pending:
                continue  # samples in flight use up its credit
            if batch.budget <= num_kept:
                continue
            if num_wanted <= request.num_slots:
                batch.add_decode(request, ())
                continue
            new_block_ids = self._allocate(request, num_wanted, batch)
            if new_block_ids is not None:
                batch.saves[request] = request.num_computed_tokens
                batch.add_decode(request, tuple(new_block_ids))
        return prompts

    def _schedule_prompts(self, batch: PlanBuilder, prompts: list[Request]) -> None:
        """Schedules chunks of running prompts in admission order, then admits waiting requests."""
        for request in prompts:
            if batch.budget > 0 and request.status is _RUNNING:
                self._add_chunk(request, batch)
        if batch.may_admit:
            self._admit(batch)

    def _add_chunk(self, request: Request, batch: PlanBuilder, max_tokens: int | None = None) -> int:
        """Schedules the next chunk of a running prompt, at most max_tokens. Admission allocated or promised its blocks.

        Returns: number of tokens; 0 if no budget of logits is left, or if other requests share the promised blocks.
        """
        num_tokens, samples, num_prompt_logits = batch.next_chunk(request, max_tokens)
        new_block_ids: Sequence[BlockId] | None = ()
        if (num_wanted := request.num_computed_tokens + num_tokens) > request.num_slots:
            new_block_ids = self._allocate(request, num_wanted, batch)
        if new_block_ids is None:
            return 0
        if num_tokens > 0:
            batch.add_row(request, num_tokens, samples, tuple(new_block_ids), num_prompt_logits)
        return num_tokens

    def _admit(self, batch: PlanBuilder) -> None:
        """Admits waiting requests, head first, while the sequence limit, the token budget and the blocks allow."""
        num_admitted = 0
        max_admitted = self._policy.max_admissions(len(self._running))
        while num_admitted < max_admitted and batch.budget > 0 and (request := self._waiting.head) is not None:
            if not self._try_admit(request, batch):
                break
            num_admitted += 1
            self._add_chunk(request, batch)
        self._policy.end_admission(num_admitted, out_of_budget=batch.budget == 0)

    def _try_admit(self, request: Request, batch: PlanBuilder) -> bool:
        """Moves a waiting request to the running ones, without a row; returns False, without a change, if it must wait.

        It waits for blocks, or after a preemption for its rows in flight.
        """
        if request.num_rows_in_flight:
            return False
        max_slots = request.max_num_tokens - 1  # the last token is never attended to
        at_bound = request.num_preemptions >= self._config.max_preemptions
        computed_blocks = self._cache.get_computed_blocks(request, is_private=at_bound)
        # One slot for the next token, so that the request is not preempted right after its admission.
        num_slots = max_slots if at_bound else min(request.num_tokens + 1, max_slots)
        if not self._cache.admit(request, num_slots, computed_blocks, is_private=at_bound):
            return False
        self._waiting.remove(request)
        self._running[request.request_id] = request
        num_hits = self._cache.num_tokens_of(computed_blocks)
        self._start(request, num_hits)
        batch.add_new_request(request, self._cache.block_ids(request), self._cache.resume_state(request, num_hits))
        return True

    def _start(self, request: Request, num_hit_tokens: int) -> None:
        """Marks an admitted request as running and counts its prefix-cache hits."""
        charge_time(request, self._now_s)
        self._policy.admit(request)
        self._totals.count_admission(request, num_hit_tokens)
        if request.status is _PREEMPTED:
            request.has_time_news = True
        else:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
        request.status = _RUNNING
        request.num_computed_tokens = num_hit_tokens

    def _allocate(self, request: Request, num_tokens: int, batch: PlanBuilder) -> Sequence[BlockId] | None:
        """Allocates blocks for the first `num_tokens` tokens of a running request.

        If too few are free, preempts other requests or this one, and the step admits no request. It preempts none if
        the steps in flight will release enough.

        Returns: the new blocks; None if the request waits for blocks of steps in flight, or was preempted.
        """
        while (new_block_ids := self._cache.allocate_slots(request, num_tokens)) is None:
            batch.may_admit = False
            num_missing = self._cache.num_missing_blocks(request, num_tokens)
            if num_missing <= self._cache.pool.num_deferred_blocks:
                break
            # The request itself is a candidate (one at the bound never lacks blocks): no better class is preempted.
            here = (one for one in self._running.values() if not self._waits_for_sample(one))
            candidates = (one for one in here if one.num_preemptions < self._config.max_preemptions)
            victim = choose_victim(candidates, self._policy, self._cache)
            self._preempt(victim, batch)
            if victim is request:
                break
        return new_block_ids

    def _preempt(self, request: Request, batch: PlanBuilder) -> None:
        """Frees all blocks of a running request and requeues it at its place; samples in flight are still accepted."""
        charge_time(request, self._now_s)
        request.has_time_news = True
        is_new = batch.remove(request)
        request.num_discarded_tokens = request.num_computed_tokens
        self._leave_running(request)
        if is_new:
            self._removed.pop()
        request.status = _PREEMPTED
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        self._waiting.push(request)

    def _waits_for_sample(self, request: Request) -> bool:
        """Whether a request has no next row because the token before is in another stage."""
        return request.num_pending_tokens > 0 and self._config.num_stages > 1

    def _only_paused_requests_run(self) -> bool:
        """Whether every running request is paused and no step in flight will release blocks."""
        if not self._running or self._cache.pool.has_steps_in_flight:
            return False
        return all(request.status is RequestStatus.PAUSED for request in self._running.values())

    def _leave_running(self, request: Request) -> None:
        del self._running[request.request_id]
        self._removed.append(request.request_id)
        self._cache.free(request)
        request.num_computed_tokens = 0

    def _accept_token(self, request: Request, token_id: int, logprobs: tuple[TokenLogprobs, ...]) -> RequestOutput:
        """Appends a sampled token; pauses or finishes the request if it was the last one allowed."""
        is_waiting = request.status is _PREEMPTED
        if is_waiting:
            self._waiting.remove(request)
        output_ids, credit = request.output_ids, request.token_credit
        start_index = len(output_ids)
        output_ids.append(token_id)
        request.num_pending_tokens -= 1
        self._totals.num_generated_tokens += 1
        num_cached_tokens = time = None
        if request.first_token_s is None or request.has_time_news or credit == 1:
            time = take_time_news(request, self._now_s)
            if request.first_token_s is None:
                request.first_token_s = self._now_s
                num_cached_tokens = request.num_cached_tokens
        if credit is not None:
            request.token_credit = credit - 1
            if credit <= 1 and not is_waiting:
                request.status = RequestStatus.PAUSED
        if is_waiting:
            self._waiting.push(request)
        reason = finish_reason(request, self._config.end_token_ids)
        completion = self._finish(request, reason) if reason is not None else None
        return tuple.__new__(  # as in `PlanBuilder.add_decode`
            RequestOutput,
            (request.request_id, start_index, (token_id,), logprobs, num_cached_tokens, completion, time, None),
        )

    def _finish_now(self, request: Request, reason: EndReason, detail: str = "") -> None:
        """Finishes a request between two steps; the next update returns its completion."""
        self._outputs.append(completion_output(request, self._finish(request, reason, detail)))

    def _finish(self, request: Request, reason: EndReason, detail: str = "") -> RequestCompletion:
        """Frees the blocks and the queue place of a request and removes it."""
        charge_time(request, self._now_s)
        if request.request_id in self._running:
            self._leave_running(request)
        else:
            self._waiting.remove(request)
            self._cache.free(request)
        request.status = _FINISHED
        del self._requests[request.request_id]
        self._deadlines.discard(request.request_id)
        self._policy.finish(request)
        return completion_of(request, reason, detail)
