"""An engine of another project is lost at some moment of a request: the client gets every token once."""

import asyncio

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.foreign_answers import answer_to
from tests.support.frontend.foreign_engine import ForeignEngine

KINDS = ("vllm", "sglang", "trtllm")
TEXT = "The quick brown fox"


def long_text(encode):
    """A prompt whose answer has at least 60 tokens: with a grammar, end tokens cannot be ignored."""
    return next(text for text in (f"{TEXT} {number}" for number in range(99)) if len(answer_to(encode(text), 60)) == 60)


async def killed_after(world, reading, num_tokens):
    """Kills the engine that has the request once the client has some tokens; returns the other engine."""
    engine = await world.holder()
    await world.until(lambda: len(reading.token_ids) >= num_tokens)
    await engine.kill()
    return world.other(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 20])
async def test_stream_continues_from_prompt_and_output(make_foreign, read, encode, kind, num_tokens):
    engines = [ForeignEngine(kind=kind, step_interval_s=0.002) for _ in range(2)]
    world = await make_foreign(*engines)
    reading = read(world, TEXT, max_tokens=120, min_tokens=60, ignore_end_token=True)
    if not num_tokens:
        engines[0].pause()
        engines[1].pause()
    other = await killed_after(world, reading, num_tokens)
    other.resume()
    await reading.complete(answer_to(encode(TEXT), 120, ignore_end=True))
    (moved,) = other.requests
    num_known = len(moved.prompt_ids) - len(TEXT)
    assert num_known >= num_tokens
    assert moved.prompt_ids == encode(TEXT) + reading.token_ids[:num_known]
    assert (moved.max_tokens, moved.min_tokens) == (120 - num_known, max(60 - num_known, 0))


@pytest.mark.parametrize("kind", KINDS)
async def test_constrained_stream_is_replayed_and_compared(make_foreign, text_request, read_request, encode, kind):
    world = await make_foreign(*(ForeignEngine(kind=kind, step_interval_s=0.002) for _ in range(2)))
    text = long_text(encode)
    request = text_request(text, max_tokens=60, output=pb.OutputOptions(token_ids=True))
    request.spec.structured_output.regex = "[A-Z@]*"
    reading = read_request(world, request)
    other = await killed_after(world, reading, 20)
    await reading.complete(answer_to(encode(text), 60))
    moved = other.requests[-1]
    assert (moved.prompt_ids, moved.max_tokens) == (encode(text), 60)


async def test_replay_that_differs_fails_and_repeats_nothing(make_foreign, text_request, read_request, encode):
    engines = [ForeignEngine(step_interval_s=0.002) for _ in range(2)]
    world = await make_foreign(*engines)
    text = long_text(encode)
    request = text_request(text, max_tokens=60, output=pb.OutputOptions(token_ids=True))
    request.spec.structured_output.regex = "[A-Z@]*"
    reading = read_request(world, request)
    engine = await world.holder()

    def other_tokens(messages):
        for message in messages:
            for index, token_id in enumerate(message.chunk.token_ids):
                message.chunk.token_ids[index] = token_id ^ 1
        return messages

    world.other(engine).rewrite = other_tokens
    await killed_after(world, reading, 20)
    await reading.end()
    assert reading.error.code() is grpc.StatusCode.INTERNAL
    assert "the answer cannot be continued" in reading.error.details()
    assert reading.token_ids == answer_to(encode(text), 60)[: len(reading.token_ids)]


async def test_penalties_on_the_answer_continue_as_biases(make_foreign, text_request, read_request, encode):
    world = await make_foreign(*(ForeignEngine(step_interval_s=0.002) for _ in range(2)))
    request = text_request(
        TEXT,
        max_tokens=80,
        ignore_end_token=True,
        sampling=pb.SamplingOptions(frequency_penalty=0.5, presence_penalty=0.25, seed=4),
        output=pb.OutputOptions(token_ids=True),
    )
    reading = read_request(world, request)
    other = await killed_after(world, reading, 30)
    await reading.complete(answer_to(encode(TEXT), 80, ignore_end=True))
    known = other.requests[-1].prompt_ids[len(TEXT) :]
    bias = dict(other.requests[-1].message.sampling_params.logit_bias)
    assert bias == {token_id: -0.25 - 0.5 * known.count(token_id) for token_id in set(known)}
    assert other.requests[-1].message.sampling_params.seed != 4


async def test_answer_that_was_complete_but_for_its_end_completes_without_a_call(make_foreign, read, encode):
    engines = [ForeignEngine(step_interval_s=0.001) for _ in range(2)]
    for engine in engines:  # the end itself never comes
        engine.rewrite = lambda messages: [one for one in messages if one.WhichOneof("response") == "chunk"]
    world = await make_foreign(*engines)
    finished = await read(world, TEXT, max_tokens=9, ignore_end_token=True).complete(
        answer_to(encode(TEXT), 9, ignore_end=True)
    )
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS
    finished = await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))
    assert finished.reason == pb.FINISH_REASON_END_TOKEN
    assert sum(len(engine.requests) for engine in engines) == 2


async def test_many_streams_of_a_killed_engine_continue(make_foreign, read, encode):
    world = await make_foreign(*(ForeignEngine(step_interval_s=0.003) for _ in range(2)))
    texts = [f"{TEXT} {number}" for number in range(64)]
    readings = [read(world, text, max_tokens=60, ignore_end_token=True) for text in texts]
    await world.until(lambda: sum(len(one.token_ids) for one in readings) > 64 * 10)
    await world.engines[0].kill()
    for text, reading in zip(texts, readings, strict=True):
        await reading.complete(answer_to(encode(text), 60, ignore_end=True))


async def test_restarted_engine_takes_its_requests_again(make_foreign, read, encode):
    world = await make_foreign(ForeignEngine(step_interval_s=0.002))
    (engine,) = world.engines
    reading = read(world, TEXT, max_tokens=100, ignore_end_token=True)
    await world.until(lambda: len(reading.token_ids) > 10)
    await engine.kill()
    await world.until_usable(0)
    await engine.start()
    await reading.complete(answer_to(encode(TEXT), 100, ignore_end=True))
    assert len(engine.requests) == 2


async def test_silent_engine_is_lost_after_the_heartbeat_timeout(make_foreign, read, encode):
    world = await make_foreign(*(ForeignEngine(step_interval_s=0.002) for _ in range(2)), heartbeat_timeout_s=2.0)
    reading = read(world, TEXT, max_tokens=100, ignore_end_token=True)
    engine = await world.holder()
    await world.until(lambda: len(reading.token_ids) > 10)
    engine.pause()
    engine.is_silent = True
    await reading.complete(answer_to(encode(TEXT), 100, ignore_end=True))
    engine.is_silent = False


async def test_kinds_may_be_mixed_and_replace_each_other(make_foreign, read, encode):
    """Also with an engine of Chairlift, which knows its weights: the others do not report theirs."""
    own = FakeEngine(step_interval_s=0.002)
    world = await make_foreign(
        own, ForeignEngine(kind="vllm", step_interval_s=0.002), ForeignEngine(kind="trtllm", step_interval_s=0.002)
    )
    readings = [read(world, f"{TEXT}{number}", max_tokens=60, ignore_end_token=True) for number in range(12)]
    await asyncio.gather(*(reading.end() for reading in readings))
    assert all(reading.error is None for reading in readings)
    assert own.submissions
    assert all(engine.requests for engine in world.engines[1:])


async def test_request_of_a_lost_engine_continues_in_one_of_another_kind(make_foreign, read, encode):
    world = await make_foreign(
        ForeignEngine(kind="sglang", step_interval_s=0.002),
        ForeignEngine(kind="vllm", step_interval_s=0.002),
    )
    reading = read(world, TEXT, max_tokens=80, ignore_end_token=True)
    await killed_after(world, reading, 20)
    await reading.complete(answer_to(encode(TEXT), 80, ignore_end=True))
