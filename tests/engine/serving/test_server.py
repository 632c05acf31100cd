"""The engine's protocol over real gRPC, with a fake model whose answers are known."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.request import SamplingParams
from engine.serving.outgoing import STEP_WINDOW
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import FAKE_TOKENIZER, RunningEngine, fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.gate import Gate

ENDLESS = FakeModel(end_probability=0.0)


@asynccontextmanager
async def held_engine() -> AsyncIterator[tuple[AttachClient, Gate]]:
    """Starts an engine with one slot, whose request 1 is blocked until the gate is opened, and a queue of two."""
    gate = Gate()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            run_engine(fake_engine_parts(model=ENDLESS, max_waiting=2, max_num_seqs=1, on_step=gate))
        )
        stack.callback(gate.open)
        async with AttachClient.open(server.address) as client:
            await client.submit(submission(1, [1], 2))
            await gate.holds()
            yield client, gate


@pytest.fixture
async def server() -> AsyncIterator[RunningEngine]:
    async with run_engine(fake_engine_parts(model=ENDLESS)) as server:
        yield server


@pytest.fixture
async def client(server: RunningEngine) -> AsyncIterator[AttachClient]:
    async with AttachClient.open(server.address) as client:
        yield client


async def test_tokens_do_not_depend_on_the_batch() -> None:
    model = FakeModel()
    rng = random.Random(1)
    prompts = {handle: [rng.randrange(1, 64) for _ in range(rng.randrange(1, 60))] for handle in range(1, 41)}
    async with run_engine(fake_engine_parts(model=model)) as server, AttachClient.open(server.address) as client:
        answers = await client.generate(*(submission(handle, ids, 40) for handle, ids in prompts.items()))
    for prompt_ids, answer in zip(prompts.values(), answers, strict=True):
        solo = model.solo_output(prompt_ids, SamplingParams(seed=0, max_tokens=40), max_model_len=256)
        assert tuple(answer.token_ids) == solo.token_ids
        assert answer.completion is not None
        assert answer.completion.num_prompt_tokens == len(prompt_ids)
        assert answer.completion.reason in (pb.COMPLETION_REASON_END_TOKEN, pb.COMPLETION_REASON_MAX_TOKENS)
        assert answer.first_token is not None


async def test_handles_of_several_frontends_are_independent(server: RunningEngine) -> None:
    async with AttachClient.open(server.address) as one, AttachClient.open(server.address) as two:
        assert one.welcome.session_id != two.welcome.session_id
        assert one.welcome.engine_instance_id == two.welcome.engine_instance_id
        (first,), (second,) = await asyncio.gather(
            one.generate(submission(1, [1, 2, 3], 30)), two.generate(submission(1, [4, 5], 30))
        )
    params = SamplingParams(seed=0, max_tokens=30)
    assert tuple(first.token_ids) == ENDLESS.solo_output([1, 2, 3], params, max_model_len=256).token_ids
    assert tuple(second.token_ids) == ENDLESS.solo_output([4, 5], params, max_model_len=256).token_ids


async def test_welcome_has_state_window_limits_and_tokenizer_digest(client: AttachClient) -> None:
    welcome = client.welcome
    assert welcome.status.state == pb.ENGINE_STATE_SERVING
    assert welcome.step_window == STEP_WINDOW
    assert welcome.info.vocab_size == ENDLESS.vocab_size
    assert welcome.info.tokenizer_sha256 == FAKE_TOKENIZER.sha256()


async def test_generation_continues_after_output_ids(client: AttachClient) -> None:
    solo = ENDLESS.solo_output([7, 8], SamplingParams(seed=0, max_tokens=20), max_model_len=256).token_ids
    (answer,) = await client.generate(submission(1, [7, 8], 20, output_ids=list(solo[:9]), epoch=3))
    assert tuple(answer.token_ids) == solo
    assert answer.completion is not None
    assert (answer.completion.epoch, answer.completion.num_output_tokens) == (3, 20)


async def test_only_requests_that_ask_for_logprobs_get_them(client: AttachClient) -> None:
    plain, asked, chosen_only = await client.generate(
        submission(1, [1], 5), submission(2, [2], 5, top_logprobs=2), submission(3, [3], 5, top_logprobs=0)
    )
    assert plain.chosen_logprobs == []
    assert len(asked.chosen_logprobs) == len(chosen_only.chosen_logprobs) == 5
    assert [[token_id for token_id, _ in top] for top in asked.top_logprobs] == [
        [token_id, (token_id + 1) % ENDLESS.vocab_size] for token_id in asked.token_ids
    ]
    assert chosen_only.top_logprobs == [[]] * 5


async def test_prompt_logprobs_precede_the_first_token(
    client: AttachClient,
) -> None:
    prompt = [5, 1, 4, 2, 3] * 20
    want = ENDLESS.solo_prompt_logprobs(prompt, 2)
    plain, asked, again = await client.generate(
        submission(1, prompt, 5),
        submission(2, prompt, 5, prompt_logprobs=2),
        submission(3, prompt, 9, prompt_logprobs=0, output_ids=[7, 7], epoch=4),
    )
    assert plain.prompt_logprobs == []
    for answer in (asked, again):
        assert answer.prompt_logprobs == pytest.approx([logprobs.chosen for logprobs in want])
    assert asked.prompt_top_logprobs == [
        list(zip(logprobs.top_ids, map(pytest.approx, logprobs.top_values), strict=True)) for logprobs in want
    ]
    assert again.prompt_top_logprobs == [[]] * 99
    assert asked.token_ids == plain.token_ids


async def test_cancel_frees_the_blocks_in_the_first_step_after_it(client: AttachClient) -> None:
    await client.submit(submission(1, [1] * 40, 200, token_credit=4), submission(2, [2], 200, token_credit=4))
    await client.until(lambda: len(client.received[1].token_ids) == len(client.received[2].token_ids) == 4)
    num_before = len(client.steps)  # both wait for credit: no step follows by itself
    await client.cancel(1)
    await client.ended(1)
    (done,) = client.steps[num_before:]
    assert [completion.handle for completion in done.completions] == [1]
    assert done.completions[0].reason == pb.COMPLETION_REASON_CANCELLED
    await client.cancel(2)
    await client.ended(2)
    assert client.steps[-1].load.num_free_blocks == client.welcome.info.num_kv_blocks


async def test_cancel_is_idempotent_and_ignores_unknown_handles(client: AttachClient) -> None:
    await client.submit(submission(1, [1], 100, token_credit=5))
    await client.cancel(1, 1, 77)
    await client.cancel(1)
    (answer,) = await client.ended(1)
    assert answer.completion is not None
    assert answer.completion.reason == pb.COMPLETION_REASON_CANCELLED
    await client.cancel(1)
    (again,) = await client.generate(submission(1, [1], 3))  # the handle is free, and a late cancel has no effect
    assert len(again.token_ids) == 3


async def test_a_cancel_for_a_deadline_has_the_end_reason_deadline(client: AttachClient) -> None:
    await client.submit(submission(1, [1], 200, token_credit=5))
    await client.cancel(1, reason=pb.CANCEL_REASON_DEADLINE)
    (answer,) = await client.ended(1)
    assert answer.completion is not None
    assert answer.completion.reason == pb.COMPLETION_REASON_DEADLINE


async def test_requests_of_a_stream_that_ends_are_cancelled(server: RunningEngine, client: AttachClient) -> None:
    async with AttachClient.open(server.address) as leaver:
        await leaver.submit(*(submission(handle, [1], 200, token_credit=2) for handle in range(1, 9)))
        await leaver.until(lambda: all(len(leaver.received[handle].token_ids) == 2 for handle in range(1, 9)))

    def is_over() -> bool:
        load = client.statuses[-1].load if client.statuses else pb.LoadStats()
        return load.num_generated_tokens_total == 16 and load.num_running == 0

    await client.until(is_over)
    assert client.statuses[-1].load.num_free_blocks == client.welcome.info.num_kv_blocks


async def test_half_closing_by_the_frontend_ends_the_stream(client: AttachClient) -> None:
    await client.submit(submission(1, [1], 200, token_credit=1))
    await client.hang_up()
    with pytest.raises(EOFError, match="OK"):
        await client.until(lambda: False)


async def test_rows_beyond_the_step_window_are_merged_and_keep_their_logprobs(
    server: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.outgoing.STEP_WINDOW", 2)
    async with AttachClient.open(server.address, acks=False) as client:
        await client.submit(submission(1, [1], 40, top_logprobs=1, token_credit=1))
        await client.until(lambda: len(client.steps) == 1)
        await client.grant(1, 1)
        await client.until(lambda: len(client.steps) == 2)
        await client.submit(submission(2, [2], 9, token_credit=5))
        await client.grant(1, 7)
        # The engine does not wait for a slow frontend: all credit is used while no step is sent.
        await client.until(lambda: client.statuses and client.statuses[-1].load.num_generated_tokens_total == 2 + 7 + 5)
        assert len(client.steps) == 2
        await client.ack(2)
        await client.until(lambda: len(client.steps) == 3)
        assert sorted(client.steps[2].token_counts) == [5, 7]
        await client.ack(3)
        await client.cancel(1, 2)
        await client.ended(1, 2)
    answer = client.received[1]
    solo = ENDLESS.solo_output([1], SamplingParams(seed=0, max_tokens=9), max_model_len=256)
    assert tuple(answer.token_ids) == solo.token_ids
    assert [top[0][0] for top in answer.top_logprobs] == answer.token_ids


async def test_a_handle_is_in_use_until_its_completion_has_been_sent(
    server: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.outgoing.STEP_WINDOW", 1)
    async with AttachClient.open(server.address, acks=False) as client:
        await client.submit(submission(1, [1], 5, token_credit=1))
        await client.until(lambda: client.steps)
        await client.grant(1, 9)  # the window is closed: the other tokens and the end are not sent
        await client.until(lambda: client.statuses and client.statuses[-1].load.num_generated_tokens_total == 5)
        await client.send(submit=pb.SubmitBatch(submissions=[submission(1, [2], 7, epoch=1)]))
        await client.until(lambda: client.rejections)
        assert [(r.epoch, r.reason) for r in client.rejections] == [(1, pb.REJECTION_REASON_INVALID)]
        await client.ack(1)
        (answer,) = await client.ended(1)
        assert len(answer.token_ids) == 5
        await client.ack(2)
        (again,) = await client.generate(submission(1, [2], 1, epoch=2))
        assert again.is_accepted


async def test_a_request_without_credit_is_paused_until_it_gets_some(client: AttachClient) -> None:
    await client.submit(submission(1, [1], 10, token_credit=4))
    await client.until(lambda: len(client.received[1].token_ids) == 4)
    await client.generate(submission(2, [2], 30))  # others go on
    assert len(client.received[1].token_ids) == 4
    await client.grant(1, 1)
    await client.until(lambda: len(client.received[1].token_ids) == 5)
    await client.grant(1, 100)
    (answer,) = await client.ended(1)
    assert len(answer.token_ids) == 10


async def test_deadlines_expire_waiting_and_paused(server: RunningEngine, client: AttachClient) -> None:
    await client.submit(
        submission(1, [1] * 8, 248, remaining_ms=0), submission(2, [2], 200, token_credit=3, remaining_ms=900_000)
    )
    await client.until(lambda: len(client.received[2].token_ids) == 3)
    server.engine._loop._clock = lambda: time.monotonic() + 1000.0
    waiting, paused = await client.ended(1, 2)
    for answer in (waiting, paused):
        assert answer.completion is not None
        assert answer.completion.reason == pb.COMPLETION_REASON_DEADLINE
    assert (len(waiting.token_ids), len(paused.token_ids)) == (0, 3)


async def test_bad_submissions_are_rejected_one_by_one(client: AttachClient) -> None:
    await client.submit(
        submission(1, [1, 99]),
        submission(2, [1] * 256),
        submission(3, [1], 5, token_credit=1),
        submission(3, [2], 5, epoch=9),
        submission(4, [1], 3),
    )
    out_of_vocabulary, too_long, good = await client.ended(1, 2, 4)
    assert out_of_vocabulary.rejection is not None
    assert out_of_vocabulary.rejection.reason == pb.REJECTION_REASON_INVALID
    assert "prompt_ids" in out_of_vocabulary.rejection.detail
    assert "99" in out_of_vocabulary.rejection.detail
    assert "64" in out_of_vocabulary.rejection.detail
    assert too_long.rejection is not None
    assert too_long.rejection.reason == pb.REJECTION_REASON_TOO_LONG
    assert "256" in too_long.rejection.detail
    assert len(good.token_ids) == 3
    assert client.received[3].is_running  # the handle's second use was rejected, its first goes on
    duplicates = [r for r in client.rejections if (r.handle, r.epoch) == (3, 9)]
    assert [r.reason for r in duplicates] == [pb.REJECTION_REASON_INVALID]


async def test_handle_zero_is_rejected(client: AttachClient) -> None:
    (answer,) = await client.generate(submission(0, [1]))
    assert answer.rejection is not None
    assert "handle is 0" in answer.rejection.detail


async def test_a_full_queue_rejects_with_a_time_to_retry() -> None:
    async with held_engine() as (client, gate):
        await client.submit(*(submission(handle, [1], 2) for handle in range(2, 7)))
        # The loop is held in a step: what goes beyond all bounds is rejected without it.
        await client.until(lambda: client.received[6].has_ended)
        gate.open()
        answers = await client.ended(*range(1, 7))
    rejected = [answer.rejection for answer in answers if answer.rejection is not None]
    assert 3 <= len(rejected) < 5
    for rejection in rejected:
        assert rejection.reason == pb.REJECTION_REASON_QUEUE_FULL
        assert rejection.retry_after.ToTimedelta().total_seconds() > 0


async def test_a_full_queue_accepts_as_many_requests_from_failed_engines() -> None:
    async with held_engine() as (client, gate):
        await client.submit(*(submission(handle, [1], 2) for handle in (2, 3)))
        await client.submit(*(submission(handle, [1], 2, epoch=1) for handle in range(4, 8)))
        await client.until(lambda: client.received[7].has_ended)  # three may be open, and three more
        gate.open()
        answers = await client.ended(*range(1, 8))
    assert [answer.rejection is None for answer in answers] == [True] * 6 + [False]
