"""Drives a scheduler with a fake model, and checks its invariants after each operation."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import Coefficients, StepTimePrior
from engine.core.latency.targets import LatencyTargets, Pacing, WhenInfeasible
from engine.core.outputs import RequestOutput, SchedulerOutput
from engine.core.request import Request, RequestId, RequestStatus, SamplingParams
from engine.core.schedulers import make_scheduler
from engine.errors import QueueFull, RequestTooLong
from tests.support.engine.answer_ledger import Answer, AnswerLedger
from tests.support.engine.fake_model import FakeModel, FakeModelRunner, SoloAnswer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--core-operations",
        type=int,
        default=None,
        help="random operations on the scheduler, 50000 if not given (needs tests/engine/core as argument)",
    )


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """make_request(id, prompt ids or length, max_tokens=4, **fields of Request or SamplingParams) -> Request."""

    def make(request_id: int, prompt: int | list[int], max_tokens: int = 4, **fields: Any) -> Request:
        prompt_ids = tuple([1] * prompt if isinstance(prompt, int) else prompt)
        names = SamplingParams.__dataclass_fields__.keys() & fields.keys()
        params = SamplingParams(**{"seed": request_id, "max_tokens": max_tokens, **{n: fields.pop(n) for n in names}})
        return Request(RequestId(request_id), prompt_ids, params, fields.pop("arrival_s", 0.0), **fields)

    return make


class Engine:
    """A scheduler with a fake model; checks its invariants in every step. No answer draws an end token."""

    def __init__(self, **config: Any) -> None:
        values = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "max_preemptions": 8,
            **config,
        }
        self.model = FakeModel(vocab_size=8, end_token_ids=frozenset({0}), end_probability=0.0)
        self.scheduler = make_scheduler(SchedulerConfig(end_token_ids=self.model.end_token_ids, **values))
        self.failures: dict[int, int] = {}  # request id -> position from which its rows fail
        self.runner = FakeModelRunner(
            self.model,
            num_blocks=values["num_blocks"],
            block_size=values["block_size"],
            groups=self.scheduler.config.cache_groups,
            fail=lambda request_id, position: "boom" if position >= self.failures.get(request_id, 1 << 30) else None,
            has_state=self.scheduler.config.num_state_snapshots is not None,
        )
        self.ledger = AnswerLedger()
        self.plans: deque[SchedulerOutput] = deque()
        self.now_s = 0.0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.ledger.expect(request)

    def launch(self) -> SchedulerOutput:
        self.now_s += 1.0
        plan = self.scheduler.schedule(self.now_s)
        self.runner.launch(plan)
        self.plans.append(plan)
        self.scheduler.check_integrity()
        return plan

    def land(self) -> list[RequestOutput]:
        outputs = self.scheduler.update(self.plans.popleft(), self.runner.collect(), self.now_s)
        self.ledger.record(outputs)
        self.scheduler.check_integrity()
        return outputs

    def step(self) -> dict[int, int]:
        """One whole step. Returns the scheduled tokens by request, in the order of the rows."""
        plan = self.launch()
        self.land()
        return {row.request_id: row.num_scheduled_tokens for row in plan.rows}

    def run(self, max_steps: int = 1000) -> list[dict[int, int]]:
        """Steps until nothing is left to do."""
        steps = []
        while self.scheduler.has_work():
            assert len(steps) < max_steps, f"work is left after {max_steps} steps"
            steps.append(self.step())
        return steps

    def answer(self, request: Request) -> Answer:
        return self.ledger.answers[request.request_id]

    def reason(self, request: Request) -> EndReason | None:
        completion = self.answer(request).completion
        return None if completion is None else completion.reason

    def is_solo_answer(self, request: Request) -> bool:
        prior = request.output_ids[: request.num_prior_output_tokens]
        solo = self.model.solo_output(request.prompt_ids, request.params, max_model_len=128, output_ids=prior)
        return tuple(self.answer(request).token_ids) == solo.token_ids


@pytest.fixture
def make_engine() -> type[Engine]:
    """make_engine(**SchedulerConfig overrides) -> Engine."""
    return Engine


TIME_KINDS = ("queued_s", "prefill_s", "decode_s", "paused_s", "preempted_s")


@dataclass
class Expectation:
    """What the harness knows about one accepted request."""

    request: Request
    solo: SoloAnswer
    num_granted: int | None  # output tokens allowed so far, None where it has ever been unlimited
    was_limited: bool
    credit: int | None  # tokens it may still generate
    has_run: bool = False
    is_resident: bool = False
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_KINDS, 0.0))
    allowed_reasons: set[EndReason] = field(default_factory=set)

    @property
    def end(self) -> tuple[float, EndReason] | None:
        """When its time is up, and what that is called: the budget if both are up at once."""
        deadline_s, budget_end_s = self.request.deadline_s, self.request.budget_end_s
        if budget_end_s is None:
            return None if deadline_s is None else (deadline_s, EndReason.DEADLINE)
        if deadline_s is None or deadline_s >= budget_end_s:
            return budget_end_s, EndReason.TIME_BUDGET
        return deadline_s, EndReason.DEADLINE

    @property
    def time_kind(self) -> str:
        """What a moment counts as now, as far as one can tell from plans, outputs and grants."""
        if self.credit is not None and self.credit <= 0:
            return "paused_s"
        if not self.has_run:
            return "queued_s"
        if not self.is_resident:
            return "preempted_s"
        has_token = len(self.request.output_ids) > self.request.num_prior_output_tokens
        return "decode_s" if has_token else "prefill_s"


class Simulation:
    """One scheduler in one random world: tiny pool, tiny vocabulary, everything that can happen, in a seeded order."""

    def __init__(self, seed: int, **config: Any) -> None:
        rng = self.rng = random.Random(seed)
        self.budget_rng = random.Random(f"budgets of {seed}")
        self.prompt_rng = random.Random(f"prompt logprobs of {seed}")
        self.model = FakeModel(vocab_size=3, end_token_ids=frozenset({0}), end_probability=0.08)
        block_size = rng.choice((1, 2, 3, 4))
        max_model_len = rng.randrange(4, 26)
        values: dict[str, Any] = {
            "num_blocks": -(-max_model_len // block_size) + rng.choice((0, 0, 1, 2, 4, 9)),
            "block_size": block_size,
            "max_num_seqs": rng.randrange(1, 7),
            "max_num_batched_tokens": rng.choice((1, 2, 3, 5, 8, 13, 40)),
            "max_model_len": max_model_len,
            "end_token_ids": self.model.end_token_ids,
            "enable_prefix_caching": rng.random() < 0.9,
            "policy": rng.choice(("fcfs", "fcfs", "priority", "static")),
            "max_waiting": rng.choice((2, 8, 64)),
            "max_preemptions": rng.choice((0, 1, 2, 8)),
            "max_steps_in_flight": rng.choice((1, 2, 2, 3)),
        }
        self.targets_rng = random.Random(f"targets of {seed}")
        step_time = StepTimePrior(Coefficients(*(self.targets_rng.choice((1e-3, 0.1, 1.0)) for _ in range(5))))
        self.config = SchedulerConfig(step_time=step_time, **{**values, **config})
        if self.config.cache_groups.num_windowed and "num_blocks" not in config:
            num_most = self.config.cache_groups.most_blocks(max_model_len, self.config.max_tokens_in_flight, block_size)
            self.config = replace(self.config, num_blocks=num_most + rng.choice((0, 0, 1, 2, 4, 9)))
        self.scheduler = make_scheduler(self.config)
        self.expectations: dict[RequestId, Expectation] = {}
        self.fails_from: dict[RequestId, int] = {}  # position
        self.runner = FakeModelRunner(
            self.model,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            groups=self.config.cache_groups,
            seed=seed,
            salt_of=lambda request_id: self.expectations[request_id].request.cache_salt,
            fail=lambda request_id, position: "boom" if position >= self.fails_from.get(request_id, 1 << 30) else None,
            has_state=self.config.num_state_snapshots is not None,
        )
        self.ledger = AnswerLedger()
        self.plans: deque[SchedulerOutput] = deque()
        self.now_s = 0.0
        self.num_requests = 0
        self.base_prompt = [rng.choice((1, 2)) for _ in range(max_model_len + 1)]

    def run(self, num_operations: int) -> None:
        """Random operations, then the liveness mode: nothing new, all credits granted, everything must end."""
        operations = [self.add, self.schedule, self.update, self.cancel, self.grant_credit, self.pass_time]
        weights = (25, 30, 30, 2, 8, 5)
        for operation in self.rng.choices(operations, weights, k=num_operations):
            operation()
            self.scheduler.check_integrity()
        self.finish()

    def add(self) -> None:
        rng, limit = self.rng, self.config.max_model_len
        prompt = self.base_prompt[: rng.randrange(1, limit + 2)]
        prompt += [rng.choice((1, 2)) for _ in range(rng.choice((0, 0, 1, 2)))]
        params = SamplingParams(
            seed=rng.randrange(3),
            max_tokens=rng.randrange(1, 16),
            min_tokens=rng.choice((0, 0, 0, 1, 3)),
            stop_token_ids=rng.choice(((), (), (2,))),
            ignore_end_token=rng.random() < 0.3,
            top_logprobs=rng.choice((None, None, 0, 2)),
            prompt_logprobs=self.prompt_rng.choice((None, None, None, 0, 2)),
        )
        salt = rng.choice((b"", b"", b"tenant"))
        request = Request(
            RequestId(self.num_requests),
            tuple(prompt),
            params,
            arrival_s=self.now_s,
            priority=rng.randrange(3),
            session=self.num_requests % 3,
            cache_salt=salt,
            deadline_s=self.now_s + rng.randrange(1, 40) if rng.random() < 0.1 else None,
            budget_end_s=self.now_s + self.budget_rng.randrange(40) if self.budget_rng.random() < 0.1 else None,
            token_credit=rng.randrange(4) if rng.random() < 0.3 else None,
            **self.random_latency(),
        )
        self.num_requests += 1
        if len(prompt) < limit:
            solo = self.model.solo_output(prompt, params, max_model_len=limit, cache_salt=salt)
            if rng.random() < 0.2:  # a continuation, sometimes of an answer that is already over
                request.output_ids.extend(solo.token_ids[: rng.randrange(len(solo.token_ids) + 1)])
                request.num_prior_output_tokens = len(request.output_ids)
        is_over = bool(request.output_ids) and len(request.output_ids) == len(solo.token_ids)
        num_waiting = self.scheduler.stats().num_waiting
        try:
            self.scheduler.add_request(request)
        except RequestTooLong:
            assert len(prompt) >= limit
            return
        except QueueFull:
            assert num_waiting >= self.config.max_waiting
            assert not is_over
            assert request.budget_end_s != self.now_s
            return
        assert len(prompt) < limit
        limited = request.token_credit is not None
        credit = request.token_credit
        expectation = Expectation(request, solo, credit, limited, credit, allowed_reasons={solo.reason})
        if rng.random() < 0.04 and not is_over:
            self.fails_from[request.request_id] = rng.randrange(request.num_tokens + 5)
            expectation.allowed_reasons.add(EndReason.ENGINE_ERROR)
        if (end := expectation.end) is not None:
            expectation.allowed_reasons.add(end[1])
        if request.targets is not None and request.targets.when_infeasible is WhenInfeasible.REFUSE:
            expectation.allowed_reasons.add(EndReason.INFEASIBLE)
        self.expectations[request.request_id] = expectation
        self.ledger.expect(request)

    def random_latency(self) -> dict[str, Any]:
        """Targets and a tenant, for the policy that reads them."""
        rng = self.targets_rng
        if self.config.policy != "slo":
            return {}
        targets = LatencyTargets(
            ttft_s=rng.choice((None, 0.0, 1.0, 10.0, 100.0)),
            inter_token_s=rng.choice((None, 0.5, 5.0)),
            pacing=rng.choice(tuple(Pacing)),
            when_infeasible=rng.choice(tuple(WhenInfeasible)),
            value=rng.choice((1.0, 3.0)),
        )
        return {
            "targets": rng.choice((None, targets, targets)),
            "tenant": rng.choice(("", "a", "b")),
            "has_moved": rng.random() < 0.1,
        }

    def schedule(self) -> None:
        if len(self.plans) == self.config.max_steps_in_flight:
            return
        plan = self.scheduler.schedule(self.now_s)
        self.plans.append(plan)
        assert plan.num_tokens <= self.config.max_num_batched_tokens, f"budget exceeded: {plan.num_tokens} tokens"
        assert len(plan.rows) <= self.config.max_num_seqs, f"slots exceeded: {len(plan.rows)} rows"
        assert len({row.request_id for row in plan.rows}) == len(plan.rows), "two rows of one request"
        if self.config.num_stages > 1:
            drawing = {row.request_id for earlier in list(self.plans)[:-1] for row in earlier.rows if row.samples}
            assert not drawing & {row.request_id for row in plan.rows}, "a row before the sample that it reads"
            assert not drawing & set(plan.removed_request_ids) & self.preempted(), (
                "preempted before its sample is known"
            )
        num_logits = sum(row.samples + row.num_prompt_logits for row in plan.rows) + sum(map(len, plan.drafts))
        assert num_logits <= self.config.max_num_seqs, f"{num_logits} rows of logits"
        drafts = [()] * (len(plan.rows) - len(plan.drafts)) + list(plan.drafts)
        for row, draft in zip(plan.rows, drafts, strict=True):
            expectation = self.expectations[row.request_id]
            assert not expectation.request.is_finished, f"work on request {row.request_id}, which has ended"
            allowed = expectation.num_granted
            produced = len(expectation.request.output_ids) - expectation.request.num_prior_output_tokens
            if allowed is not None and row.samples:
                assert produced + len(draft) < allowed, (
                    f"request {row.request_id} has {produced} tokens of {allowed} granted"
                )
        for expectation in self.expectations.values():
            if (end := expectation.end) is not None and end[0] <= self.now_s:
                assert expectation.request.is_finished, "alive after its deadline"
            expectation.is_resident &= expectation.request.request_id not in plan.removed_request_ids
        for new in plan.new_requests:
            self.expectations[new.request_id].has_run = self.expectations[new.request_id].is_resident = True
        self.runner.launch(plan)

    def preempted(self) -> set[RequestId]:
        return {i for i, e in self.expectations.items() if e.request.status is RequestStatus.PREEMPTED}

    def update(self) -> None:
        if self.plans:
            plan = self.plans.popleft()
            outputs = self.scheduler.update(plan, self.runner.collect(), self.now_s)
            self.ledger.record(outputs)
            for output in outputs:
                expectation = self.expectations[output.request_id]
                if expectation.credit is not None:
                    expectation.credit -= len(output.token_ids)
                if output.completion is not None:
                    self.check_answer(output.request_id)

    def cancel(self) -> None:
        if self.num_requests:
            request_id = RequestId(self.rng.randrange(self.num_requests))
            if request_id in self.expectations and not self.expectations[request_id].request.is_finished:
                self.expectations[request_id].allowed_reasons = {EndReason.CANCELLED}
            self.scheduler.cancel(request_id, self.now_s)

    def grant_credit(self) -> None:
        recent = [e for e in self.expectations.values() if not e.request.is_finished]
        if recent:
            expectation = self.rng.choice(recent)
            num_tokens = self.rng.choice((0, 1, 1, 2, 8))
            expectation.was_limited = True
            if expectation.num_granted is not None:
                expectation.num_granted += num_tokens
            expectation.credit = (expectation.credit or 0) + num_tokens
            self.scheduler.grant_credit(expectation.request.request_id, num_tokens, self.now_s)

    def pass_time(self) -> None:
        passed_s = self.rng.choice((0.1, 1.0, 5.0))
        self.now_s += passed_s
        for expectation in self.expectations.values():
            if not expectation.request.is_finished:
                expectation.spent_s[expectation.time_kind] += passed_s

    def finish(self) -> None:
        """Liveness: every request with credit ends within a bound, however many are paused."""
        self.run_dry()
        paused = [e.request for e in self.expectations.values() if not e.request.is_finished]
        for request in paused:
            assert request.token_credit is not None, f"request {request.request_id} never ended"
            assert request.token_credit <= 0, f"request {request.request_id} has credit and never ended"
            self.expectations[request.request_id].num_granted = None
            self.expectations[request.request_id].credit = 1000
            self.scheduler.grant_credit(request.request_id, 1000, self.now_s)
        self.run_dry()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_prefill_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == self.config.num_cache_blocks, f"{stats.num_free_blocks} blocks came back"
        for request_id in self.expectations:
            assert self.ledger.answers[request_id].completion is not None, f"request {request_id} never ended"

    def run_dry(self) -> None:
        """Steps until there is nothing to do; at least one token is computed in two steps, each at most once per
        residence.
        """
        live = [e.request for e in self.expectations.values() if not e.request.is_finished]
        bound = 10 + 2 * sum(request.max_num_tokens for request in live) * (self.config.max_preemptions + 3)
        for _ in range(bound):
            if self.scheduler.has_work():
                self.schedule()
            elif not self.plans:
                return
            if len(self.plans) == self.config.max_steps_in_flight or not self.scheduler.has_work():
                self.update()
            self.scheduler.check_integrity()
        raise AssertionError(f"work is left after {bound} steps: {self.scheduler.stats()}")

    def check_answer(self, request_id: RequestId) -> None:
        """An answer is the solo answer, or a part of it where something else ended the request."""
        expectation, answer = self.expectations[request_id], self.ledger.answers[request_id]
        completion, solo = answer.completion, expectation.solo
        assert completion is not None
        assert completion.reason in expectation.allowed_reasons, f"request {request_id}: {completion.reason}"
        produced = tuple(answer.token_ids)
        assert produced == solo.token_ids[: len(produced)], f"request {request_id}: {produced}, alone {solo.token_ids}"
        assert not (produced and completion.reason is EndReason.INFEASIBLE), f"request {request_id} was refused late"
        if completion.reason is solo.reason:
            assert produced == solo.token_ids, f"request {request_id}: {produced}, alone {solo.token_ids}"
        if expectation.request.params.top_logprobs is not None:
            assert len(answer.logprobs) == len(produced) - expectation.request.num_prior_output_tokens
        request = expectation.request
        if (num_top := request.params.prompt_logprobs) is not None:
            wanted = self.model.solo_prompt_logprobs(request.prompt_ids, num_top, cache_salt=request.cache_salt)
            assert answer.prompt_logprobs == wanted[: len(answer.prompt_logprobs)], f"request {request_id}: prompt"
        spent_s = {kind: getattr(completion.time, kind) for kind in TIME_KINDS}
        assert spent_s == pytest.approx(expectation.spent_s, abs=1e-6), f"request {request_id}: time account"
        if not expectation.was_limited:
            assert completion.time.num_preemptions <= self.config.max_preemptions, "preempted too often"


@pytest.fixture
def simulate() -> Callable[..., Simulation]:
    """simulate(seed, num_operations, **SchedulerConfig overrides): runs one random world to its end and returns it."""

    def run(seed: int, num_operations: int, **config: Any) -> Simulation:
        simulation = Simulation(seed, **config)
        simulation.run(num_operations)
        return simulation

    return run
