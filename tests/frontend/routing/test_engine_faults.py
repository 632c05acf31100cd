"""An engine that violates the protocol: single requests fail, or the stream is opened again."""

import asyncio
import logging

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.frontend.calls import failure


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


def copy_of(pair, step):
    """Returns a copy of a step that is sent as well, so that the sequence numbers of later steps grow by one."""
    copy = engine_pb.StepResult()
    copy.CopyFrom(step)
    (session,) = pair.engine._sessions
    session.step_seq += 1
    return copy


def repeated_row(pair, step):
    copy = copy_of(pair, step)
    copy.step_seq += 1
    return [step, copy]


def row_of_an_earlier_attempt(pair, step):
    old = copy_of(pair, step)
    old.epochs[0], old.token_ids[0] = 7, 5
    step.step_seq += 1
    return [old, step]


def row_of_an_unknown_handle(pair, step):
    columns = (step.handles, step.epochs, step.start_indices, step.token_counts, step.token_ids)
    for column, value in zip(columns, (99, 0, 5, 1, 1), strict=True):
        column.append(value)
    step.completions.add(handle=98, reason=engine_pb.COMPLETION_REASON_END_TOKEN)
    return [step]


@pytest.mark.parametrize("late", [repeated_row, row_of_an_earlier_attempt, row_of_an_unknown_handle])
async def test_late_row_is_dropped(pair, text_request, late):
    mangle_once(pair, lambda step: late(pair, step))
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"


def token_outside_the_vocabulary(step):
    step.token_ids[0:1] = [258]


def wrong_count_at_the_end(step):
    for completion in step.completions:
        completion.num_output_tokens += 1


def engine_error(step):
    for completion in step.completions:
        completion.reason = engine_pb.COMPLETION_REASON_ENGINE_ERROR
        completion.detail = "NaN in the logits"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (token_outside_the_vocabulary, "the engine sent token 258, the vocabulary has 258"),
        (wrong_count_at_the_end, "the engine counts 5 output tokens, 4 arrived"),
        (engine_error, "NaN in the logits"),
    ],
)
async def test_fault_of_the_engine_fails_the_request(pair, text_request, change, words):
    def rewrite(step):
        change(step)
        return [step]

    pair.engine.rewrite_step = rewrite
    error = await failure(pair.stub().StreamGenerate(text_request("abc")))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert words in error.details()
    assert "ENGINE_FAULT" in str(error.trailing_metadata())


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
async def test_broken_stream_is_closed_and_opened_again(pair, text_request, how):
    def break_it(step):
        BROKEN_STREAMS[how](step)
        return [step]

    mangle_once(pair, break_it)
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"
    assert len(pair.engine.hellos) == 2
    assert [submission.epoch for submission in pair.engine.submissions] == [0, 1]
    assert await failure_or_text(pair.stub().StreamGenerate(text_request("abc"))) == "abc"
