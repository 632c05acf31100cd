"""Several answers to one request: one prompt, a seed for each answer, one end for all."""

import asyncio
import gc

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.calls import failure
from tests.support.frontend.fake_engine import FakeEngine, rejection

ENDLESS = {"max_tokens": 4000, "ignore_end_token": True}


def several(text, num_answers, *, seed=None, output=None, **stop):
    sampling = None if seed is None else pb.SamplingOptions(seed=seed)
    return pb.GenerationSpec(
        text=text, num_answers=num_answers, sampling=sampling, output=output, stop=pb.StopOptions(**stop)
    )


def stream(pair, spec, **options):
    return pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec), **options)


async def answers_differ(pair):
    """Makes the fake engine answer the i-th submission with the digit i, over and over. Handles come back: the first
    answer may have ended when the second is submitted.
    """
    counted = await pair.stub().CountTokens(pb.CountTokensRequest(text="0123456789", return_token_ids=True))
    digits = list(counted.token_ids)

    def rewrite(step):
        numbers = {submission.handle: number for number, submission in enumerate(pair.engine.submissions, 1)}
        for row, handle in enumerate(step.handles):
            if step.token_ids[row] < 256:  # not the end token
                step.token_ids[row] = digits[numbers[handle]]
        return [step]

    pair.engine.rewrite_step = rewrite


async def running(pair, spec, **options):
    """A stream whose answers have all been submitted, in an engine that makes no step by itself."""
    pair.engine.pause()
    call = stream(pair, spec, **options)
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    await pair.engine.step()
    await pair.engine.wait_for(lambda: pair.engine.num_open == spec.num_answers)
    return call


async def test_further_answers_are_submitted_at_the_first_token(pair):
    pair.engine.pause()
    call = stream(pair, several("abc", 4, seed=7))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    assert pair.app.admission.num_requests == 4  # all of them wait
    assert pair.app.admission.num_tokens == 3  # for one prompt
    await pair.engine.step()
    await pair.engine.wait_for(lambda: pair.engine.num_open == 4)
    assert len({bytes(submission.prompt_ids) for submission in pair.engine.submissions}) == 1
    assert pair.app.admission.num_requests == 3
    await pair.engine.step()
    while (await call.read()).chunk.answer_index == 0:
        pass
    assert pair.app.admission.num_requests == 0  # all run, none has ended
    pair.engine.resume()
    while (await call.read()) is not grpc.aio.EOF:
        pass


async def test_seeds_of_further_answers_follow_the_proto(pair):
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("abc", 3, seed=2**64 - 1)))
    expected = [0xFFFFFFFFFFFFFFFF, 0x9E3779B97F4A7C14, 0x3C6EF372FE94F829]
    assert [submission.sampling.seed for submission in pair.engine.submissions] == expected
    assert [answer.finished.seed, *(other.finished.seed for other in answer.other_answers)] == expected
    assert answer.effective_sampling.seed == expected[0]


async def test_num_answers_1_equals_the_default(pair):
    asked = await pair.stub().Generate(pb.GenerateRequest(spec=several("abc", 1, seed=3)))
    unasked = await pair.stub().Generate(
        pb.GenerateRequest(spec=pb.GenerationSpec(text="abc", sampling=pb.SamplingOptions(seed=3)))
    )
    assert asked.text == unasked.text == "abc"
    assert not asked.other_answers
    first, second = pair.engine.submissions
    for submission in (first, second):
        submission.request_id = ""
        submission.ClearField("remaining_ms")
    assert first == second


async def test_stream_has_one_started_and_one_finished_for_each_answer(pair):
    await answers_differ(pair)
    messages = [message async for message in stream(pair, several("x" * 40, 5))]
    assert [message.WhichOneof("event") for message in messages].count("started") == 1
    assert messages[0].HasField("started")
    finished = [message.finished for message in messages if message.HasField("finished")]
    assert sorted(each.answer_index for each in finished) == [0, 1, 2, 3, 4]
    for index in range(5):
        chunks = [
            message.chunk for message in messages if message.HasField("chunk") and message.chunk.answer_index == index
        ]
        assert "".join(chunk.text for chunk in chunks) == str(index + 1) * 40
        next_index = 0
        for chunk in chunks:
            assert chunk.first_token_index == next_index
            next_index += chunk.num_tokens
        (usage,) = [each.usage for each in finished if each.answer_index == index]
        assert next_index == usage.num_output_tokens == 41


async def test_unary_call_returns_the_answers_in_order(pair):
    await answers_differ(pair)
    output = pb.OutputOptions(token_ids=True, top_logprobs=1)
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("xyz", 4, output=output)))
    whole = [answer, *answer.other_answers]
    assert [each.text for each in whole] == ["111", "222", "333", "444"]
    assert [each.finished.answer_index for each in whole] == [0, 1, 2, 3]
    for each in whole:
        assert len(each.token_ids) == len(each.logprobs.chosen) == each.finished.usage.num_output_tokens == 4
        assert each.finished.reason == pb.FINISH_REASON_END_TOKEN
        assert each.finished.timing.total.ToNanoseconds() >= each.finished.timing.first_token.ToNanoseconds() > 0


async def test_stop_text_ends_only_its_own_answer(pair):
    await answers_differ(pair)
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("xxxxx", 3, stop_texts=["22"])))
    assert [answer.text, *(other.text for other in answer.other_answers)] == ["11111", "", "33333"]
    assert answer.other_answers[0].finished.stop_text == "22"
    assert answer.other_answers[1].finished.reason == pb.FINISH_REASON_END_TOKEN


async def test_cancel_ends_all_answers_in_the_engine(pair):
    call = await running(pair, several("abcdef", 3))
    assert (await call.read()).HasField("started")
    call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 3)
    assert {reason for _, reason in pair.engine.cancels} == {engine_pb.CANCEL_REASON_CLIENT}
    pair.engine.resume()
    await pair.idle()


async def test_cancel_before_the_first_token_submits_no_other_answer(pair):
    pair.engine.pause()
    call = stream(pair, several("abc", 3))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    call.cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    pair.engine.resume()
    await pair.idle()
    assert len(pair.engine.submissions) == 1


async def test_deadline_ends_all_answers(pair):
    call = await running(pair, several("abcdef", 3), timeout=5.0)  # longer than a busy machine stalls
    assert all(0 < submission.remaining_ms <= 5050 for submission in pair.engine.submissions)  # gRPC rounds it
    assert (await failure(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 3)
    assert {reason for _, reason in pair.engine.cancels} == {engine_pb.CANCEL_REASON_DEADLINE}
    pair.engine.resume()


async def test_error_of_one_answer_ends_the_call_and_the_others(pair):
    def fail_the_second(step):
        if 2 in step.handles:
            step.completions.add(handle=2, reason=engine_pb.COMPLETION_REASON_ENGINE_ERROR, detail="row 2 is broken")
        return [step]

    call = await running(pair, several("abcdef", 3, **ENDLESS))
    pair.engine.rewrite_step = fail_the_second
    await pair.engine.step()
    pair.engine.rewrite_step = lambda step: [step]
    error = await failure(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "row 2 is broken" in error.details()
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 2)
    assert {handle for handle, _ in pair.engine.cancels} == {1, 3}
    (session,) = pair.engine._sessions
    del session.requests[2]  # the engine has ended it already
    pair.engine.resume()


def full():
    return rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "256 wait", retry_after_s=0)


async def test_further_answer_that_the_full_queue_rejects_is_submitted_again(pair):
    pair.engine.rejections = [None, None, full(), None, full(), full()]
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("abc", 4, seed=5)))
    assert [answer.text, *(other.text for other in answer.other_answers)] == ["abc"] * 4
    seeds = [submission.sampling.seed for submission in pair.engine.submissions]
    assert len(seeds) == 7
    assert len(set(seeds)) == 4
    await pair.idle()


async def test_first_answer_that_the_full_queue_rejects_ends_the_call(pair):
    pair.engine.rejections = [full()]
    error = await failure(stream(pair, several("abc", 4, **ENDLESS)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(pair.engine.submissions) == 1


async def test_further_answer_with_a_permanent_error_ends_the_call(pair):
    pair.engine.rejections = [None, None, rejection(engine_pb.REJECTION_REASON_TOO_LONG, "9 blocks, 8 in all")]
    error = await failure(stream(pair, several("abc", 4, **ENDLESS)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    await pair.idle()


async def test_call_can_be_cancelled_while_an_answer_waits_for_the_queue(pair):
    pair.engine.rejections = [None, *[full()] * 10_000]
    call = stream(pair, several("abc", 2, **ENDLESS))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) > 3)
    call.cancel()
    await pair.engine.wait_for(lambda: pair.engine.cancels)
    await pair.idle()
    pair.session.check_integrity()


async def test_deadline_ends_the_wait_for_the_queue(pair):
    pair.engine.rejections = [None, *[full()] * 100_000]
    error = await failure(stream(pair, several("abc", 2), timeout=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await pair.idle()


async def test_engine_that_goes_away_fails_all_answers_quietly(make_pair, caplog):
    pair = await make_pair(failover_timeout_s=0)
    call = await running(pair, several("abc", 8))
    await pair.engine.kill()
    assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
    await pair.app.calls.wait_idle()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_stalled_reader_ends_all_answers(make_pair):
    engine = FakeEngine(max_model_len=200_000, tokens_per_step=64)
    pair = await make_pair(engine=engine, stall_timeout_s=0.3)
    spec = several("x" * 400, 2, max_tokens=150_000, ignore_end_token=True)
    channel = pair.channel(("grpc.http2.bdp_probe", 0))  # the window stays at 64 KiB
    method = channel.unary_stream(
        "/chairlift.v1.GenerationService/StreamGenerate",
        request_serializer=pb.StreamGenerateRequest.SerializeToString,
        response_deserializer=pb.StreamGenerateResponse.FromString,
    )
    call = method(pb.StreamGenerateRequest(spec=spec))
    assert (await call.read()).HasField("started")
    await engine.wait_for(lambda: len(engine.cancels) == 2)
    assert {reason for _, reason in engine.cancels} == {engine_pb.CANCEL_REASON_STALLED}
    await pair.idle()
    await channel.close()


@pytest.mark.parametrize("window", [1, 3])
async def test_small_windows_lose_nothing(make_pair, window):
    pair = await make_pair(token_window=window)
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("abcdefghij" * 5, 3)))
    assert {answer.text, *(other.text for other in answer.other_answers)} == {"abcdefghij" * 5}
    assert {submission.token_credit for submission in pair.engine.submissions} == {window}


async def test_more_answers_than_the_queue_has_places_are_no_retryable_refusal(make_pair):
    pair = await make_pair(max_queued_requests=3)
    with pytest.raises(grpc.aio.AioRpcError, match="4 answers are requested, and at most 3 requests") as caught:
        await pair.stub().Generate(pb.GenerateRequest(spec=several("x" * 60, 4)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=several("x" * 60, 3)))
    assert len(answer.other_answers) == 2


async def test_cancel_storm_leaves_nothing(make_pair):
    pair = await make_pair(engine=FakeEngine(step_interval_s=0.001))

    async def one(number):
        call = stream(pair, several("x" * 100, 1 + number % 8))
        for _ in range(number % 11):
            await call.read()
        call.cancel()

    await asyncio.gather(*(one(number) for number in range(88)))
    await pair.idle()
    pair.session.check_integrity()
