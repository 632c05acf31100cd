"""The step loop and the real runner on a device that does everything late, in random worlds; every answer is known."""

import random
from collections import Counter

import pytest

from chairlift.service.end_reason import EndReason
from engine.constraints.constraint import Constraint
from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.schedulers import make_scheduler
from engine.errors import QueueFull
from engine.interfaces import AdmissionReport, Cancel, GrantCredit, Inbox, StepReport, Submit
from engine.model.model_shape import LayerShape, ModelShape
from engine.runner.buckets import decode_buckets, mixed_buckets
from engine.runner.kv_cache import KVCachePlan
from engine.runner.model_runner import RunnerOptions
from engine.runner.step_buffers import BIAS_CAPACITY
from engine.step_loop import StepLoop
from tests.support.engine.answer_ledger import AnswerLedger
from tests.support.engine.fake_device import ChainDecoder, ChainMatcher, ChainOps, PoisoningRunner, is_penalised
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.stream import LateStream

VOCAB_SIZE = 31


class PromptInbox(Inbox):
    """Never waits."""

    def drain(self, timeout_s):
        return super().drain(0.0)


class CountingRunner(PoisoningRunner):
    """Counts what a harness must have seen to prove anything."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = Counter()

    def collect(self):
        plan = self._in_flight[0][0]
        result = super().collect()
        assert all(row.samples or token_id == -1 for row, token_id in zip(plan.rows, result.token_ids, strict=True))
        return result

    def _compute(self, step):
        assert step.logits is None, "the forward pass of a step is queued twice"
        batch = step.batch
        metadata = batch.inputs.metadata
        self.seen["unresolved ids"] += batch.num_unresolved > 0
        self.seen["mixed steps"] += 0 < metadata.num_one_token_reqs < metadata.num_reqs
        self.seen["penalised steps"] += batch.columns.any_penalised
        self.seen["masked steps"] += bool(step.masked)
        num_prompt_rows = len(batch.prompts.plan_rows)
        self.seen["prompts with draws"] += 0 < num_prompt_rows < batch.num_logits
        self.seen["prompts in decode steps"] += metadata.max_query_len == 1 and num_prompt_rows > 0
        self.seen["large biases"] += len(batch.biases.ids) > BIAS_CAPACITY
        super()._compute(step)


class DeviceWorld:
    """One engine without sockets in one random world: small pool, everything that can happen, in a seeded order.

    Attributes:
        tokens: answers of the requests that ended by themselves, by id.
        seen: what has happened, and how often.
    """

    def __init__(self, seed, **config):
        rng = self.rng = random.Random(seed)
        self.request_rng = random.Random(~seed)  # requests are the same however many steps are in flight
        self.prompt_rng = random.Random(f"prompt logprobs of {seed}")
        self.is_constrained = seed % 2 == 0
        self.model = FakeModel(vocab_size=VOCAB_SIZE, end_token_ids=frozenset({0, 7}), end_probability=0.06)
        block_size = rng.choice((1, 2, 4, 5))
        max_model_len = rng.randrange(6, 34)
        num_blocks = -(-max_model_len // block_size) + rng.choice((0, 1, 2, 4, 9, 30))
        max_num_seqs = rng.choice((1, 2, 3, 5, 9, 12))
        values = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": rng.choice((1, 3, 8, 13, 40)),
            "max_model_len": max_model_len,
            "end_token_ids": self.model.end_token_ids,
            "enable_prefix_caching": rng.random() < 0.9,
            "policy": rng.choice(("fcfs", "fcfs", "priority", "static")),
            "max_waiting": rng.choice((3, 64)),
            "max_preemptions": rng.choice((0, 1, 2, 8)),
            "max_steps_in_flight": rng.choice((1, 2, 2, 3)),
        }
        self.config = SchedulerConfig(**{**values, **config})
        max_num_seqs = self.config.max_num_seqs
        if self.config.drafts is not None:
            self.model.use_tokens(2)  # so that many a guess is right
        some_sizes = rng.sample(range(1, max_num_seqs + 1), rng.randrange(1, max_num_seqs + 1))
        ladder = rng.choice(((), decode_buckets(max_num_seqs), tuple(sorted(some_sizes))))
        mixed_rng = random.Random(f"recorded steps with prompts of {seed}")
        max_num_tokens = self.config.max_num_batched_tokens
        some_sizes = mixed_rng.sample(range(1, max_num_tokens + 1), mixed_rng.randrange(1, max_num_tokens + 1))
        mixed = mixed_rng.choice(((), mixed_buckets(max_num_tokens), tuple(sorted(some_sizes))))
        self.requests, self.fails_at = {}, {}  # by seed
        self.decoder = ChainDecoder(self.model, ladder, mixed)
        self.ops = ChainOps(self.model, self.requests, self.fails_at, ladder, mixed)
        self.stream = LateStream(seed, eagerness=rng.choice((0.0, 0.2, 0.6)))
        self.runner = CountingRunner(
            self.decoder,
            ModelShape(
                layers=(LayerShape(num_heads=1, num_kv_heads=1, head_dim=1),),
                vocab_size=VOCAB_SIZE,
                max_position_embeddings=max_model_len,
                end_token_ids=self.model.end_token_ids,
                checkpoint_dtype="float32",
            ),
            KVCachePlan(self.config.num_blocks, block_size, 1, max_model_len),
            self.ops,
            RunnerOptions(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                stream=self.stream,
                max_steps_in_flight=self.config.max_steps_in_flight,
                decode_buckets=ladder,
                mixed_buckets=mixed,
            ),
        )
        self.scheduler = make_scheduler(self.config)
        self.inbox = PromptInbox()
        self.now_s = 0.0
        self.loop = StepLoop(self.scheduler, self.runner, self.inbox, self.report, clock=lambda: self.now_s)
        self.ledger = AnswerLedger()
        self.submitted = {}  # by id, until rejected
        self.solos, self.allowed_reasons = {}, {}
        self.num_requests = 0
        self.base_prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(max_model_len)]
        self.tokens = {}
        self.seen = Counter()

    def run(self, num_operations):
        """Random operations, then nothing new, and everything must end."""
        operations = [self.turn, self.submit, self.cancel, self.grant_credit, self.pass_time, self.stream.move_on]
        for operation in self.rng.choices(operations, (50, 22, 2, 6, 5, 15), k=num_operations):
            operation()
        self.finish()

    def turn(self):
        self.loop.turn()
        self.scheduler.check_integrity()
        self.runner._state.check_integrity()

    def submit(self):
        rng, limit = self.request_rng, self.config.max_model_len
        prompt = self.base_prompt[: rng.randrange(limit)]
        prompt = (prompt + [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 2)))])[: limit - 1] or [1]
        params = self.draw_params()
        solo = self.model.solo_output(prompt, params, max_model_len=limit)
        num_prior = rng.randrange(len(solo.token_ids)) if rng.random() < 0.15 else 0
        request = Request(
            RequestId(self.num_requests),
            tuple(prompt),
            params,
            arrival_s=self.now_s,
            output_ids=list(solo.token_ids[:num_prior]),
            priority=rng.randrange(3),
            deadline_s=self.now_s + rng.randrange(1, 60) if rng.random() < 0.08 else None,
            token_credit=rng.randrange(5) if rng.random() < 0.25 else None,
            constraint=self.draw_constraint(prompt) if self.is_constrained else None,
        )
        self.num_requests += 1
        self.requests[params.seed] = self.submitted[request.request_id] = request
        self.solos[request.request_id] = solo
        self.allowed_reasons[request.request_id] = {solo.reason}
        if request.deadline_s is not None:
            self.allowed_reasons[request.request_id].add(EndReason.DEADLINE)
        if rng.random() < 0.06:
            self.fails_at[params.seed] = rng.randrange(num_prior, num_prior + 6)
            self.allowed_reasons[request.request_id].add(EndReason.ENGINE_ERROR)
        self.inbox.put(Submit((request,)))

    def draw_constraint(self, prompt):
        """None, one that is another after every token, or one that stays."""
        matcher = self.request_rng.choice((None, ChainMatcher(self.model, prompt), ChainMatcher(self.model, prompt)))
        allowed_ids = () if matcher else self.request_rng.sample(range(VOCAB_SIZE), self.request_rng.randrange(4))
        return Constraint(VOCAB_SIZE, matcher=matcher, allowed_ids=allowed_ids) if matcher or allowed_ids else None

    def draw_params(self):
        rng, index = self.request_rng, self.num_requests
        penalties = {}
        if rng.random() < 0.35:
            name = rng.choice(("repetition_penalty", "presence_penalty", "frequency_penalty"))
            penalties[name] = rng.choice((0.5, 1.5))
        num_biases = rng.choice((0, 0, 0, 0, 1, 3))
        if rng.random() < 0.01:
            num_biases = BIAS_CAPACITY + 1
        return SamplingParams(
            seed=index if index % 2 else 2**64 - 1 - index,
            max_tokens=rng.randrange(1, 20),
            min_tokens=rng.choice((0, 0, 0, 1, 4)),
            stop_token_ids=rng.choice(((), (), (2, 3, 4))),
            ignore_end_token=rng.random() < 0.3,
            temperature=rng.choice((0.0, 0.5, 1.0)),
            top_k=rng.choice((0, 0, 3, 2**31 - 1)),
            top_p=rng.choice((1.0, 1.0, 0.75)),
            min_p=rng.choice((0.0, 0.0, 0.125)),
            logit_bias=tuple((i % VOCAB_SIZE, float(index % 100 + i % 3)) for i in range(num_biases)),
            top_logprobs=rng.choice((None, None, None, 0, 2, 5)),
            prompt_logprobs=self.prompt_rng.choice((None, None, None, 0, 3)),
            **penalties,
        )

    def cancel(self):
        if self.num_requests:
            request_id = RequestId(self.rng.randrange(self.num_requests))
            self.allowed_reasons[request_id].add(EndReason.CANCELLED)
            self.inbox.put(Cancel((request_id,), EndReason.CANCELLED))

    def grant_credit(self):
        open_ids = [request_id for request_id, answer in self.ledger.answers.items() if answer.completion is None]
        if open_ids:
            self.inbox.put(GrantCredit(((self.rng.choice(open_ids), self.rng.choice((1, 1, 2, 8))),)))

    def pass_time(self):
        self.now_s += self.rng.choice((0.1, 1.0, 5.0))

    def finish(self):
        """A request with credit ends within a bound."""
        self.turn()
        open_requests = [self.submitted[i] for i, answer in self.ledger.answers.items() if answer.completion is None]
        self.inbox.put(GrantCredit(tuple((request.request_id, 1000) for request in open_requests)))
        bound = 30 + 4 * sum(request.max_num_tokens for request in open_requests) * (self.config.max_preemptions + 3)
        if self.rng.random() < 0.3:
            self.loop.drain(1e9)
            self.loop.run()
        for _ in range(bound):
            if all(answer.completion is not None for answer in self.ledger.answers.values()):
                break
            self.turn()
        for request_id, answer in self.ledger.answers.items():
            assert answer.completion is not None, f"request {request_id} never ended"
        for _ in range(3):
            self.turn()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == self.config.num_blocks, f"{stats.num_free_blocks} blocks came back"
        self.seen += self.runner.seen
        self.seen["padding rows"] += self.decoder.num_padding_rows
        self.seen["padding tokens"] += self.decoder.num_padding_tokens
        self.seen["recorded steps with prompts"] += self.ops.num_mixed_replays
        self.seen["preemptions"] += stats.num_preemptions_total
        self.seen["prefix hits"] += stats.prefix_cache_hits_total
        self.seen["tokens"] += stats.num_generated_tokens_total
        self.seen["drafted tokens"] += stats.num_draft_tokens_total
        self.seen["accepted tokens"] += stats.num_accepted_tokens_total
        self.seen["steps"] += self.decoder.num_steps

    def report(self, report):
        if isinstance(report, AdmissionReport):
            for request_id in report.accepted:
                self.ledger.expect(self.submitted[request_id])
            for request_id, error in report.rejected:
                assert isinstance(error, QueueFull), f"request {request_id}: {error}"
                del self.submitted[request_id]
        elif isinstance(report, StepReport):
            self.ledger.record(report.outputs)
            for output in report.outputs:
                self.check_answer(output.request_id)

    def check_answer(self, request_id):
        """After every token, so that a wrong one is found when it is drawn."""
        answer, solo, request = self.ledger.answers[request_id], self.solos[request_id], self.submitted[request_id]
        produced = tuple(answer.token_ids)
        assert produced == solo.token_ids[: len(produced)], f"request {request_id}: {produced}, alone {solo.token_ids}"
        if (num_top := request.params.prompt_logprobs) is not None:
            wanted = self.model.solo_prompt_logprobs(request.prompt_ids, num_top)
            assert answer.prompt_logprobs == wanted[: len(answer.prompt_logprobs)], f"request {request_id}: prompt"
        if answer.completion is None:
            return
        self.seen["prompt logprobs"] += len(answer.prompt_logprobs)
        reason = answer.completion.reason
        assert reason in self.allowed_reasons[request_id], f"request {request_id}: {reason}"
        self.seen[reason.name] += 1
        params = request.params
        if reason is EndReason.ENGINE_ERROR:
            assert "NaN" in answer.completion.detail
            assert len(produced) == self.fails_at[params.seed], f"request {request_id} fails after {len(produced)}"
        if reason is solo.reason:
            assert produced == solo.token_ids, f"request {request_id}: {produced}, alone {solo.token_ids}"
            self.tokens[request_id] = produced
            self.seen["penalised answers"] += is_penalised(params)
        if params.top_logprobs is not None:
            assert len(answer.logprobs) == len(produced) - request.num_prior_output_tokens
            assert all(len(logprobs.top_ids) == params.top_logprobs for logprobs in answer.logprobs)
            chosen = produced[request.num_prior_output_tokens :]
            if params.top_logprobs:
                assert [logprobs.top_ids[0] for logprobs in answer.logprobs] == list(chosen)


@pytest.fixture
def simulate():
    """simulate(seed, num_operations, **SchedulerConfig overrides): runs one random world to its end and returns it."""

    def run(seed, num_operations, **config):
        world = DeviceWorld(seed, **config)
        world.run(num_operations)
        return world

    return run
