"""The parts of a latency breakdown add up to the total and belong to the right phase."""

import asyncio
import random

import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.generation.answer.timing import timing
from frontend.generation.deadline import Deadline
from frontend.types import AnswerTimes, EngineTime
from tests.support.frontend.fake_engine import FakeEngine

PARTS = ("queued", "tokenized", "prefill", "decode", "parked", "preempted", "moved")


def microseconds(account, *names):
    values = [getattr(account, name).ToNanoseconds() for name in names]
    assert not any(value % 1000 for value in values)
    return [value // 1000 for value in values]


def check_sum(account):
    parts = microseconds(account, *PARTS)
    assert min(parts) >= 0
    assert [sum(parts)] == microseconds(account, "total")


def test_parts_of_a_whole_answer():
    times = AnswerTimes(accepted_at_s=10.0, tokenized_s=0.5, submitted_at_s=10.75)
    engine = EngineTime(queued_s=1.0, prefill_s=2.0, parked_s=0.25, preempted_s=0.125, num_preemptions=3)
    account = timing(times, engine, first_token_at_s=14.0, client_wait_s=0.5, now_s=20.0)
    assert microseconds(account, *PARTS) == [1_250_000, 500_000, 2_000_000, 5_375_000, 750_000, 125_000, 0]
    assert microseconds(account, "first_token", "total") == [4_000_000, 10_000_000]
    assert account.num_preemptions == 3


def test_answer_without_a_token_has_not_decoded():
    times = AnswerTimes(accepted_at_s=10.0, tokenized_s=0.5, submitted_at_s=10.5)
    engine = EngineTime(queued_s=1.0, prefill_s=2.0)
    account = timing(times, engine, first_token_at_s=None, client_wait_s=0.0, now_s=14.0)
    assert microseconds(account, *PARTS) == [1_500_000, 500_000, 2_000_000, 0, 0, 0, 0]
    assert not account.HasField("first_token")


def test_parts_add_up_for_any_clock_readings():
    rng = random.Random(1)
    for _ in range(5000):
        draw = lambda: rng.choice([0.0, rng.random() * 1e-5, rng.random(), rng.random() * 1e4])  # noqa: E731
        accepted_at_s = draw() * 100
        tokenized_s = draw()
        times = AnswerTimes(
            accepted_at_s=accepted_at_s,
            tokenized_s=tokenized_s,
            submitted_at_s=accepted_at_s + tokenized_s + draw() - draw() * 0.01,
        )
        engine = EngineTime(queued_s=draw(), prefill_s=draw(), parked_s=draw(), preempted_s=draw())
        account = timing(
            times,
            rng.choice([engine, engine, None]),
            first_token_at_s=rng.choice([None, accepted_at_s + draw()]),
            client_wait_s=draw(),
            now_s=accepted_at_s + rng.choice([draw(), -draw() * 0.01]),
        )
        check_sum(account)


async def collect(call):
    return [message async for message in call]


def finished_of(messages):
    return [message.finished for message in messages if message.HasField("finished")]


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ({}, pb.FINISH_REASON_END_TOKEN),
        ({"max_tokens": 2}, pb.FINISH_REASON_MAX_TOKENS),
        ({"stop_texts": ["c"], "ignore_end_token": True, "max_tokens": 4000}, pb.FINISH_REASON_STOP_TEXT),
    ],
)
async def test_every_answer_has_a_whole_account(make_pair, text_request, stop, reason):
    pair = await make_pair(engine=FakeEngine(step_interval_s=0.005))
    request = text_request("abcd", **stop)
    request.spec.num_answers = 2
    for finished in finished_of(await collect(pair.stub().StreamGenerate(request))):
        assert finished.reason == reason
        account = finished.timing
        check_sum(account)
        queued_us, prefill_us, decode_us, tokenized_us = microseconds(
            account, "queued", "prefill", "decode", "tokenized"
        )
        assert prefill_us == 2000  # what FakeEngine says
        assert queued_us >= 1000
        assert decode_us >= 1000  # at least one more step
        assert tokenized_us > 0


async def test_time_without_credit_is_parked_and_a_stop_text_does_not_change_that(skip, make_pair, text_request):
    """The reader comes back when the engine has long used up its credit, and finds the stop text in what it missed."""
    pair = await make_pair(engine=FakeEngine(tokens_per_step=4), token_window=8)
    attachment = pair.app.engines.attachment()
    streams = []
    submit = attachment.session.submit

    def watched(request, num_cached_tokens=0):
        streams.append(request.stream)
        submit(request, num_cached_tokens)

    attachment.session.submit = watched
    generations = pair.app._generations
    request = text_request("abcdefg!", stop_texts=["!"], ignore_end_token=True, max_tokens=4000)
    async with generations.open(request.spec, Deadline.at(None)) as answer:
        messages = answer.messages()
        assert (await anext(messages)).HasField("started")
        await pair.engine.wait_for(lambda: pair.engine.num_steps >= 2)
        while streams[0].num_tokens < 8 or not pair.engine.all_parked:
            await asyncio.sleep(0)
        skip(0.05)
        finished = finished_of([message async for message in messages])[0]
    assert finished.reason == pb.FINISH_REASON_STOP_TEXT
    check_sum(finished.timing)
    (parked_us,) = microseconds(finished.timing, "parked")
    assert parked_us >= 47_000  # FakeEngine says 2 ms of prefill, however little it took


async def test_answer_that_lies_ready_is_parked_until_it_is_taken(skip, make_pair, text_request):
    pair = await make_pair()
    async with pair.app._generations.open(text_request("abc").spec, Deadline.at(None)) as answer:
        messages = answer.messages()
        assert (await anext(messages)).HasField("started")
        await pair.engine.wait_for(lambda: pair.engine.num_open == 0)
        while pair.session.num_open:
            await asyncio.sleep(0)
        skip(0.05)
        finished = finished_of([message async for message in messages])[0]
    check_sum(finished.timing)
    assert microseconds(finished.timing, "parked")[0] >= 47_000  # as above


async def test_engines_own_account_counts(make_pair, text_request):
    def rewrite(step):
        for completion in step.completions:
            completion.parked_us, completion.preempted_us, completion.num_preemptions = 3000, 4000, 2
        return [step]

    engine = FakeEngine(step_interval_s=0.01)
    engine.rewrite_step = rewrite
    pair = await make_pair(engine=engine)
    (finished,) = finished_of(await collect(pair.stub().StreamGenerate(text_request("abc"))))
    check_sum(finished.timing)
    assert microseconds(finished.timing, "preempted") == [4000]
    assert microseconds(finished.timing, "parked")[0] >= 3000
    assert finished.timing.num_preemptions == 2


async def test_timing_of_a_stop_text_includes_earlier_preemption(make_pair, text_request):
    """From the engine's news, because its Completion comes later."""

    def rewrite(step):
        for row, handle in enumerate(step.handles):
            if step.start_indices[row] == 2:
                step.time_accounts.add(handle=handle, queued_us=1000, prefill_us=2000, preempted_us=5000)
                step.time_accounts[-1].num_preemptions = 1
        assert all(completion.reason != engine_pb.COMPLETION_REASON_END_TOKEN for completion in step.completions)
        return [step]

    engine = FakeEngine(step_interval_s=0.01)
    engine.rewrite_step = rewrite
    pair = await make_pair(engine=engine)
    stub = pair.stub()
    request = text_request("abcdef", stop_texts=["d"], ignore_end_token=True, max_tokens=4000)
    (finished,) = finished_of(await collect(stub.StreamGenerate(request)))
    check_sum(finished.timing)
    assert microseconds(finished.timing, "preempted") == [5000]
    assert finished.timing.num_preemptions == 1
