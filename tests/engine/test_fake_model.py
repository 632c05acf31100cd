"""The fake model detects every kind of wrong plan."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.outputs import NewRequest, RequestOutput, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner, execute
from tests.support.engine.answer_ledger import AnswerLedger, drive
from tests.support.engine.fake_model import FakeModel, FakeModelRunner, OracleViolation

BLOCK_SIZE = 4
PARAMS = SamplingParams(seed=1, max_tokens=8)


def new(request_id: int, token_ids: Sequence[int], *block_ids: int) -> NewRequest:
    return NewRequest(
        RequestId(request_id), tuple(token_ids), len(token_ids), PARAMS, tuple(BlockId(b) for b in block_ids)
    )


def row(request_id: int, start: int, num_tokens: int, *new_blocks: int, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(RequestId(request_id), num_tokens, start, tuple(BlockId(b) for b in new_blocks), samples)


def plan(
    step: int, *rows: ScheduledRow, new_requests: Sequence[NewRequest] = (), removed: Sequence[int] = ()
) -> SchedulerOutput:
    removed_ids = tuple(RequestId(request_id) for request_id in removed)
    return SchedulerOutput(step, removed_ids, tuple(new_requests), rows, sum(row.num_scheduled_tokens for row in rows))


@pytest.fixture
def runner() -> FakeModelRunner:
    return FakeModelRunner(num_blocks=8, block_size=BLOCK_SIZE)


@pytest.fixture
def started(runner: FakeModelRunner) -> FakeModelRunner:
    """Request 1 has computed [1] * 6 into blocks 0 and 1 and drawn a token."""
    execute(runner, plan(1, row(1, 0, 6), new_requests=[new(1, [1] * 6, 0, 1)]))
    return runner


class TestRunner:
    def test_is_a_model_runner(self, runner: FakeModelRunner) -> None:
        as_protocol: ModelRunner = runner
        assert execute(as_protocol, plan(1)).token_ids == ()

    def test_own_tokens_are_accepted_over_many_steps_and_blocks(self, started: FakeModelRunner) -> None:
        for step in range(2, 12):
            position = 4 + step
            blocks = (position // BLOCK_SIZE,) if position % BLOCK_SIZE == 0 else ()
            assert execute(started, plan(step, row(1, position, 1, *blocks))).token_ids[0] >= 0

    def test_shared_prefix_is_accepted(self, started: FakeModelRunner) -> None:
        execute(started, plan(2, row(2, 4, 3), new_requests=[new(2, [1] * 4 + [2] * 3, 0, 5)]))

    def test_prefix_of_other_tokens_is_detected(self, started: FakeModelRunner) -> None:
        with pytest.raises(OracleViolation, match="request 2 attends to position 3, block 0, slot 3"):
            execute(started, plan(2, row(2, 4, 3), new_requests=[new(2, [1, 1, 1, 2, 2, 2, 2], 0, 5)]))

    def test_prefix_of_another_tenant_is_detected(self) -> None:
        runner = FakeModelRunner(num_blocks=8, block_size=4, salt_of=lambda request_id: bytes([request_id]))
        execute(runner, plan(1, row(1, 0, 6), new_requests=[new(1, [1] * 6, 0, 1)]))
        with pytest.raises(OracleViolation, match="request 2 attends to position 0"):
            execute(runner, plan(2, row(2, 4, 2), new_requests=[new(2, [1] * 6, 0, 5)]))

    def test_equal_tokens_at_another_position_are_detected(self, started: FakeModelRunner) -> None:
        with pytest.raises(OracleViolation, match="request 2 attends to position 4, block 0"):
            execute(started, plan(2, row(2, 8, 1), new_requests=[new(2, [1] * 9, 0, 0, 5)]))

    def test_missing_recompute_is_detected(self, started: FakeModelRunner) -> None:
        with pytest.raises(OracleViolation, match="request 2 attends to position 0, block 6"):
            execute(started, plan(2, row(2, 5, 1), new_requests=[new(2, [3] * 6, 6, 7)]))

    def test_block_overwritten_by_another_is_noticed(self, started: FakeModelRunner) -> None:
        execute(started, plan(2, row(2, 0, 2), new_requests=[new(2, [2] * 2, 1)]))
        with pytest.raises(OracleViolation, match="request 1 attends to position 4, block 1"):
            execute(started, plan(3, row(1, 6, 1)))

    def test_write_beyond_the_block_table_is_detected(self, started: FakeModelRunner) -> None:
        for position in (6, 7):
            execute(started, plan(position, row(1, position, 1)))
        with pytest.raises(OracleViolation, match="request 1, positions 8 to 8: its block table has 2 blocks"):
            execute(started, plan(9, row(1, 8, 1)))

    @pytest.mark.parametrize(
        ("bad_row", "message"),
        [
            (row(1, 5, 2), "positions 5 to 6: the row before ended at 5"),
            (row(1, 6, 2), "positions 6 to 7: only 7 tokens are known"),
            (row(1, 6, 1, samples=False), "positions 6 to 6 of 7: samples is False"),
            (row(1, 6, 0), "request 1 has a row of 0 tokens"),
            (row(9, 0, 1), "request 9, which is not known"),
        ],
    )
    def test_rows_that_contradict_the_progress_are_detected(
        self, started: FakeModelRunner, bad_row: ScheduledRow, message: str
    ) -> None:
        with pytest.raises(OracleViolation, match=message):
            execute(started, plan(2, bad_row))

    def test_inconsistent_plans_are_detected(self, started: FakeModelRunner) -> None:
        with pytest.raises(OracleViolation, match="removes request 5, which was never new"):
            started.launch(plan(2, removed=[5]))
        with pytest.raises(OracleViolation, match="introduces request 1 again"):
            started.launch(plan(2, new_requests=[new(1, [1], 3)]))
        with pytest.raises(OracleViolation, match="1 tokens in its rows and says 3"):
            started.launch(replace(plan(2, row(1, 6, 1)), num_tokens=3))
        with pytest.raises(OracleViolation, match="a one-token row after a wider one, row 1"):
            started.launch(plan(2, row(2, 0, 2), row(1, 6, 1), new_requests=[new(2, [2, 2], 3)]))

    def test_rows_of_launched_plans_execute_late_and_in_any_order_but_their_own(self) -> None:
        """A block that is reused while a plan in flight reads it must be noticed in some order of execution."""
        noticed = 0
        for seed in range(40):
            runner = FakeModelRunner(num_blocks=8, block_size=BLOCK_SIZE, seed=seed)
            execute(runner, plan(1, row(1, 0, 4), new_requests=[new(1, [1] * 4, 0)]))
            runner.launch(plan(2, row(1, 4, 1, 1)))
            runner.launch(plan(3, row(1, 5, 1), row(2, 0, 1), new_requests=[new(2, [2], 0)]))
            try:
                runner.collect()
                runner.collect()
            except OracleViolation:
                noticed += 1
        assert 5 < noticed < 40

    def test_sampled_tokens_feed_the_next_launched_plan(self) -> None:
        ahead, stepwise = (FakeModelRunner(num_blocks=8, block_size=BLOCK_SIZE) for _ in range(2))
        plans = [
            plan(1, row(1, 0, 3), new_requests=[new(1, [1] * 3, 0)]),
            plan(2, row(1, 3, 1)),
            plan(3, row(1, 4, 1, 1)),
        ]
        for each in plans:
            ahead.launch(each)
        assert [ahead.collect().token_ids for _ in plans] == [execute(stepwise, each).token_ids for each in plans]

    def test_a_failed_row_fails_alone_and_invalidates_its_slots(self) -> None:
        runner = FakeModelRunner(num_blocks=8, block_size=4, fail=lambda i, _: "NaN logits" if i == 1 else None)
        requests = [new(1, [1] * 6, 0, 1), new(2, [1] * 6, 2, 3)]
        result = execute(runner, plan(1, row(1, 0, 6), row(2, 0, 6), new_requests=requests))
        assert (result.failures, result.token_ids[0]) == ({0: "NaN logits"}, -1)
        assert result.token_ids[1] >= 0
        with pytest.raises(OracleViolation, match="request 3 attends to position 0, block 0"):
            execute(runner, plan(2, row(3, 4, 2), new_requests=[new(3, [1] * 6, 0, 5)]))

    def test_on_step_is_called_before_each_plan_runs(self) -> None:
        seen: list[int] = []
        runner = FakeModelRunner(num_blocks=8, on_step=lambda plan: seen.append(plan.step))
        execute(runner, plan(1))
        runner.launch(plan(2))
        assert seen == [1]
        runner.collect()
        assert (seen, runner.num_executed_steps) == ([1, 2], 2)

    def test_logprobs_are_reported_to_requests_that_ask(self) -> None:
        runner = FakeModelRunner(num_blocks=8)
        asks = new(1, [1], 0)._replace(params=replace(PARAMS, top_logprobs=3))
        result = execute(runner, plan(1, row(1, 0, 1), row(2, 0, 1), new_requests=[asks, new(2, [1], 1)]))
        assert list(result.logprobs) == [0]
        chosen, top_ids, top_values = result.logprobs[0]
        assert (top_ids[0], top_values[0], len(top_ids)) == (result.token_ids[0], chosen, 3)
        assert list(top_values) == sorted(top_values, reverse=True)


class TestModel:
    def test_answers_end_by_themselves_with_spread_lengths(self) -> None:
        model = FakeModel(end_probability=0.05)
        answers = [
            model.solo_output([7, 7], SamplingParams(seed=seed, max_tokens=500), max_model_len=1000)
            for seed in range(300)
        ]
        lengths = sorted(len(answer.token_ids) for answer in answers)
        assert all(answer.reason is EndReason.END_TOKEN for answer in answers)
        assert 15 < sum(lengths) / 300 < 25
        assert lengths[270] > 5 * lengths[30]

    def test_token_depends_on_salt_seed_and_every_token_before(self) -> None:
        model = FakeModel(vocab_size=1000, end_probability=0.0)

        def answer(prompt: list[int], seed: int = 1, salt: bytes = b"") -> tuple[int, ...]:
            params = SamplingParams(seed=seed, max_tokens=4)
            return model.solo_output(prompt, params, max_model_len=100, cache_salt=salt).token_ids

        variants = [answer([1, 2, 3]), answer([2, 2, 3]), answer([1, 2, 3], 2), answer([1, 2, 3], 1, b"x")]
        assert len(set(variants)) == 4
        assert answer([1, 2, 3]) == variants[0]

    def test_end_and_stop_tokens_are_masked_before_min_tokens(self) -> None:
        model = FakeModel(vocab_size=4, end_probability=0.5)
        for seed in range(50):
            params = SamplingParams(seed=seed, max_tokens=20, min_tokens=6, stop_token_ids=(2,))
            token_ids = model.solo_output([1], params, max_model_len=100).token_ids
            assert len(token_ids) > 6
            assert not {0, 2} & set(token_ids[:6])

    def test_solo_answer_of_a_continuation_is_the_whole_answer(self) -> None:
        model = FakeModel()
        params = SamplingParams(seed=3, max_tokens=30, ignore_end_token=True)
        whole = model.solo_output([5, 6], params, max_model_len=100)
        rest = model.solo_output([5, 6], params, max_model_len=100, output_ids=whole.token_ids[:9])
        assert rest == whole
        assert model.solo_output([5, 6], params, max_model_len=12).reason is EndReason.CONTEXT_FULL


class TestLedger:
    @pytest.fixture
    def ledger(self) -> AnswerLedger:
        ledger = AnswerLedger()
        ledger.expect(Request(RequestId(1), (1,), PARAMS, 0.0, output_ids=[9]))
        ledger.record([RequestOutput(RequestId(1), 1, (5,), num_cached_tokens=0)])
        return ledger

    @pytest.mark.parametrize(
        ("output", "message"),
        [
            (RequestOutput(RequestId(2), 0, (5,)), "request 2 was never accepted"),
            (RequestOutput(RequestId(1), 3, (5,)), "continues at 3, 2 are here"),
            (RequestOutput(RequestId(1), 1, (5,)), "continues at 1, 2 are here"),
            (RequestOutput(RequestId(1), 2, ()), "an output without news"),
            (RequestOutput(RequestId(1), 2, (5,), num_cached_tokens=0), "two first tokens"),
        ],
    )
    def test_invalid_outputs_are_detected(self, ledger: AnswerLedger, output: RequestOutput, message: str) -> None:
        with pytest.raises(OracleViolation, match=message):
            ledger.record([output])


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_drive_yields_the_solo_answers(max_steps_in_flight: int) -> None:
    model = FakeModel()
    config = SchedulerConfig(
        num_blocks=40,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        max_model_len=200,
        end_token_ids=model.end_token_ids,
        max_steps_in_flight=max_steps_in_flight,
    )
    requests = [
        Request(RequestId(i), (1, 2, 3, *range(i)), SamplingParams(seed=i, max_tokens=60), 0.0) for i in range(30)
    ]
    expected = [model.solo_output(r.prompt_ids, r.params, max_model_len=200) for r in requests]
    answers = drive(
        Scheduler(config), FakeModelRunner(model, num_blocks=40), requests, max_steps_in_flight=max_steps_in_flight
    )
    assert [tuple(answer.token_ids) for answer in answers.values()] == [solo.token_ids for solo in expected]
    reasons = [answer.completion.reason for answer in answers.values() if answer.completion]
    assert reasons == [solo.reason for solo in expected]


def test_drive_fails_after_max_steps() -> None:
    config = SchedulerConfig(num_blocks=4, max_num_seqs=1, max_num_batched_tokens=4, max_model_len=64)
    request = Request(RequestId(1), (1,), SamplingParams(seed=0, max_tokens=60, ignore_end_token=True), 0.0)
    with pytest.raises(OracleViolation, match="work is left after 5 steps"):
        drive(Scheduler(config), FakeModelRunner(num_blocks=4), [request], max_steps=5)


def test_no_torch() -> None:
    code = "import sys, tests.support.engine.fake_model; assert not {'torch', 'grpc', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
