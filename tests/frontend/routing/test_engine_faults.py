"""An engine that violates the protocol: which requests fail, and what the stream costs."""

import asyncio
import logging

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def mangle_once(pair, change):
    """Replaces the first step with rows by what `change` returns."""

    def rewrite(step):
        pair.engine.rewrite_step = lambda step: [step]
        return change(step)

    pair.engine.rewrite_step = rewrite


async def test_missing_token_fails_that_request_alone(pair, text_request, caplog):
    pair.engine.pause()
    stub = pair.stub()
    calls = [stub.StreamGenerate(text_request("abc")), stub.StreamGenerate(text_request("abc"))]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 2)
    bad_handle = pair.engine.submissions[0].handle

    def drop_row(step):
        position = list(step.handles).index(bad_handle)
        for column in (step.handles, step.epochs, step.start_indices, step.token_counts, step.token_ids):
            del column[position]
        return [step]

    mangle_once(pair, drop_row)
    pair.engine.resume()
    with caplog.at_level(logging.ERROR):
        outcomes = await asyncio.gather(*map(failure_or_text, calls))
    assert set(outcomes) == {grpc.StatusCode.INTERNAL, "abc"}
    assert "output token 1 when 0 was next" in caplog.text


async def failure_or_text(call):
    text = ""
    try:
        async for message in call:
            text += message.chunk.text
    except grpc.aio.AioRpcError as error:
        return error.code()
    return text


async def test_repeated_row_is_dropped(pair, text_request):
    def repeat(step):
        again = engine_pb.StepResult()
        again.CopyFrom(step)
        shift_later_steps(pair)
        again.step_seq += 1
        return [step, again]

    mangle_once(pair, repeat)
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"


async def test_row_of_an_earlier_attempt_is_dropped(pair, text_request):
    def stale(step):
        old = engine_pb.StepResult()
        old.CopyFrom(step)
        old.epochs[0] = 7
        old.token_ids[0] = 5
        shift_later_steps(pair)
        step.step_seq += 1
        return [old, step]

    mangle_once(pair, stale)
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"


async def test_row_of_an_unknown_handle_is_dropped(pair, text_request):
    def foreign(step):
        step.handles.append(99)
        step.epochs.append(0)
        step.start_indices.append(5)
        step.token_counts.append(1)
        step.token_ids.append(1)
        step.completions.add(handle=98, reason=engine_pb.COMPLETION_REASON_END_TOKEN)
        return [step]

    mangle_once(pair, foreign)
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"


def shift_later_steps(pair):
    """An additional step has been sent: the later ones count on from it."""
    (session,) = pair.engine._sessions
    session.step_seq += 1


async def test_token_outside_the_vocabulary_fails_that_request(pair, text_request):
    def foreign(step):
        step.token_ids[0] = 258
        return [step]

    mangle_once(pair, foreign)
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "258" in error.details()


async def test_wrong_count_at_the_end_fails_that_request(pair, text_request):
    def miscount(step):
        for completion in step.completions:
            completion.num_output_tokens += 1
        return [step]

    pair.engine.rewrite_step = miscount
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "ENGINE_FAULT" in str(error.trailing_metadata())


async def test_engine_error_is_internal_with_its_detail(pair, text_request):
    def fault(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_ENGINE_ERROR
            completion.detail = "NaN in the logits"
        return [step]

    pair.engine.rewrite_step = fault
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "NaN in the logits" in error.details()


async def test_request_that_the_engine_drops_continues(pair, text_request):
    def cancel(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_CANCELLED
            pair.engine.rewrite_step = lambda step: [step]
        return [step]

    pair.engine.rewrite_step = cancel
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"
    assert [submission.epoch for submission in pair.engine.submissions] == [0, 1]


BROKEN_STREAMS = {
    "a step is missing": lambda step: setattr(step, "step_seq", step.step_seq + 1),
    "columns do not match": lambda step: step.start_indices.append(0),
    "epochs do not match": lambda step: step.epochs.append(0),
}


@pytest.mark.parametrize("how", BROKEN_STREAMS)
async def test_broken_stream_is_dropped_and_opened_anew(pair, text_request, how):
    def break_it(step):
        BROKEN_STREAMS[how](step)
        return [step]

    mangle_once(pair, break_it)
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"
    assert len(pair.engine.hellos) == 2
    assert [submission.epoch for submission in pair.engine.submissions] == [0, 1]
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"
