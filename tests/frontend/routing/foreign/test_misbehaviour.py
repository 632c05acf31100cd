"""Engines that lie, stop in the middle, or speak a newer proto: one line or one status each, and nothing is lost."""

import asyncio

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2

from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing.foreign.tokenizer_bundle import fetch_archive
from tests.support.frontend.byte_tokenizer import VOCAB_SIZE
from tests.support.frontend.foreign_answers import answer_to
from tests.support.frontend.foreign_engine import ForeignEngine

KINDS = ("vllm", "sglang", "trtllm")
TEXT = "The quick brown fox"


def chunk(message):
    return message.chunk if message.WhichOneof("response") == "chunk" else None


async def error_of(reading):
    await reading.end()
    assert reading.error is not None
    return reading.error.code(), reading.error.details()


@pytest.mark.parametrize("kind", KINDS)
async def test_stream_that_ends_in_the_middle_continues(make_foreign, read, encode, kind, caplog):
    world = await make_foreign(ForeignEngine(kind=kind, num_cut=5))
    await read(world, TEXT, max_tokens=30, ignore_end_token=True).complete(answer_to(encode(TEXT), 30, ignore_end=True))
    lines = [one for one in caplog.records if "ended a stream before the answer had ended" in one.message]
    assert len([one for one in lines if one.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED])
async def test_stream_that_the_engine_aborts_continues_in_another(make_foreign, read, encode, kind, code):
    world = await make_foreign(kind, kind)
    reading_engine = world.engines[0]
    reading_engine.error = world.engines[1].error = None
    for engine in world.engines:
        engine.error = (7, code, "shutting down")
    await read(world, TEXT, max_tokens=30, ignore_end_token=True).complete(answer_to(encode(TEXT), 30, ignore_end=True))


@pytest.mark.parametrize("kind", KINDS)
async def test_more_tokens_than_max_tokens_are_dropped(make_foreign, read, encode, kind, caplog):
    world = await make_foreign(kind)
    (engine,) = world.engines
    ask, engine_answers = 8, engine.answers

    def more(request, context):
        request.max_tokens = 20
        return engine_answers(request, context)

    engine.answers = more
    finished = await read(world, TEXT, max_tokens=ask, ignore_end_token=True).complete(
        answer_to(encode(TEXT), ask, ignore_end=True)
    )
    assert finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert "sent more tokens than max_tokens" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_token_outside_the_vocabulary_is_a_fault_of_one_request(make_foreign, read, encode, kind):
    world = await make_foreign(kind)
    (engine,) = world.engines

    def wrong(messages):
        for message in filter(chunk, messages):
            message.chunk.token_ids[0] = VOCAB_SIZE
        return messages

    engine.rewrite = wrong
    assert await error_of(read(world, TEXT, ignore_end_token=True)) == (
        grpc.StatusCode.INTERNAL,
        f"the engine sent token {VOCAB_SIZE}, the vocabulary has {VOCAB_SIZE}",
    )
    engine.rewrite = list
    await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))


def complete(field, value):
    """Changes a field of the last message."""

    def rewrite(messages):
        for message in messages:
            if message.WhichOneof("response") == "complete":
                if isinstance(value, list):
                    getattr(message.complete, field)[:] = value
                else:
                    setattr(message.complete, field, value)
        return messages

    return rewrite


def chunks(field, value):
    """Changes a field of every chunk."""

    def rewrite(messages):
        for message in filter(chunk, messages):
            setattr(message.chunk, field, value)
        return messages

    return rewrite


def without_logprobs(messages):
    for message in filter(chunk, messages):
        message.chunk.ClearField("output_logprobs")
    return messages


def short_prompt(messages):
    for message in filter(chunk, messages):
        for field in ("token_logprobs", "token_ids", "top_logprobs"):
            del getattr(message.chunk.input_logprobs, field)[4:]
    return messages


@pytest.mark.parametrize(
    ("rewrite", "details"),
    [
        (complete("finish_reason", "bored"), 'the engine ended the answer with the unknown reason "bored"'),
        (complete("finish_reason", "error"), None),
        (complete("output_ids", [70, 70, 70, 3]), "the engine ended the answer with other tokens than it sent"),
        (chunks("prompt_tokens", 3), f"the engine read 3 prompt tokens, it was sent {len(TEXT)}"),
        (chunks("index", 1), "the engine sent answer 2 of 1"),
        (without_logprobs, "the engine sent no log-probabilities"),
        (short_prompt, f"log-probabilities of 4 prompt tokens, it was sent {len(TEXT)}"),
    ],
)
async def test_contradictions_are_faults_of_one_request(make_foreign, read, encode, rewrite, details):
    world = await make_foreign("vllm")
    (engine,) = world.engines
    engine.rewrite = rewrite
    reading = read(world, TEXT, max_tokens=9, output={"top_logprobs": 1, "prompt_logprobs": 1})
    if details is not None:
        assert await error_of(reading) == (grpc.StatusCode.INTERNAL, f"the engine failed this request: {details}")
    else:  # it had made progress: the answer is continued, here by nothing
        await reading.complete(answer_to(encode(TEXT), 9))
    engine.rewrite = list
    await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))


async def test_failure_before_the_first_token_is_not_repeated(make_foreign, read):
    world = await make_foreign("vllm", "vllm")
    failed = vllm_engine_pb2.GenerateResponse(complete=vllm_engine_pb2.GenerateComplete(finish_reason="error"))
    for engine in world.engines:
        engine.rewrite = lambda messages: [failed]
    code, details = await error_of(read(world, TEXT))
    assert code is grpc.StatusCode.INTERNAL
    assert "the engine failed this request; its log says why" in details
    assert sum(len(engine.requests) for engine in world.engines) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL),
    ],
)
async def test_status_of_the_engine_reaches_the_client(make_foreign, read, code, status):
    world = await make_foreign(ForeignEngine(error=(0, code, "no, because")))
    found, details = await error_of(read(world, TEXT))
    assert found is status
    assert "no, because" in details


async def test_engine_without_progress_is_given_up_after_the_failover_timeout(make_foreign, read):
    world = await make_foreign(ForeignEngine(error=(0, grpc.StatusCode.UNAVAILABLE, "not now")), failover_timeout_s=0.3)
    code, details = await error_of(read(world, TEXT))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "not now" in details
    assert len(world.engines[0].requests) < 10  # with pauses


@pytest.mark.parametrize("kind", KINDS)
async def test_internal_error_of_an_unhealthy_engine_is_its_loss(make_foreign, read, encode, kind, caplog):
    world = await make_foreign(kind, kind)
    world.engines[0].pause()
    world.engines[1].pause()
    reading = read(world, TEXT, max_tokens=30)
    engine = await world.holder()
    engine.error, engine.problem = (0, grpc.StatusCode.INTERNAL, "engine core died"), "the engine core is dead"
    engine.resume()
    world.other(engine).resume()
    await reading.complete(answer_to(encode(TEXT), 30))
    assert "the engine core is dead" in caplog.text


async def test_responses_of_a_newer_proto_are_skipped_with_one_line(make_foreign, read, encode, caplog):
    world = await make_foreign("vllm")
    (engine,) = world.engines
    unknown = vllm_engine_pb2.GenerateResponse.FromString(b"\xa2\x06\x03new")  # field 100
    engine.rewrite = lambda messages: [unknown, *messages, unknown]
    for _ in range(2):
        await read(world, TEXT, max_tokens=20).complete(answer_to(encode(TEXT), 20))
    lines = [one for one in caplog.records if "does not know" in one.message and one.levelname == "WARNING"]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        (ForeignEngine(info={"max_context_length": 0}), "the engine reports a context of 0 tokens"),
        (ForeignEngine(info={"vocab_size": 0}), "the engine reports a vocabulary of 0 tokens"),
        (ForeignEngine(info={"is_generation": False}), "does not generate text"),
        (ForeignEngine(unimplemented={"GetTokenizer"}), "give --tokenizer a folder"),
        (ForeignEngine(unimplemented={"GetModelInfo"}), "it does not serve vllm.grpc.engine.VllmEngine"),
        (ForeignEngine(files={"tokenizer.model": b"x"}), "has no tokenizer.json, only tokenizer.model"),
        (ForeignEngine(files={"tokenizer.json": b"{}"}), "the engine's tokenizer cannot be read here"),
        (ForeignEngine(sha256="0" * 64), "does not have the SHA-256 that it announced"),
    ],
)
async def test_engine_that_cannot_be_used_gets_one_line(make_foreign, engine, line, caplog):
    world = await make_foreign(engine, usable=0)
    await world.until(lambda: line in caplog.text)
    assert len([one for one in caplog.records if line in one.message and one.levelno > 10]) == 1
    assert not world.app.engines.serving


async def test_tokenizer_that_takes_longer_than_a_welcome_is_waited_for(make_foreign, read, encode, monkeypatch):
    async def fetch_slowly(chunks):
        await asyncio.sleep(0.2)
        return await fetch_archive(chunks)

    monkeypatch.setattr("frontend.routing.connection._WELCOME_TIMEOUT_S", 0.1)
    monkeypatch.setattr("frontend.routing.foreign.attach.fetch_archive", fetch_slowly)
    world = await make_foreign("vllm")
    await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))


async def test_engine_of_another_project_is_named(make_foreign, caplog):
    sglang = ForeignEngine(kind="sglang")
    start = sglang.start

    async def start_as_vllm():
        return (await start()).replace("sglang://", "vllm://")

    sglang.start = start_as_vllm
    world = await make_foreign(sglang, usable=0)
    await world.until(lambda: "does not serve vllm.grpc.engine.VllmEngine: is it vLLM" in caplog.text)


async def test_engine_without_loads_serves(make_foreign, read, encode, caplog):
    world = await make_foreign(ForeignEngine(unimplemented={"GetLoads"}))
    await read(world, TEXT).complete(answer_to(encode(TEXT), 3000))
    assert "does not report its load" in caplog.text


async def test_answer_that_ends_short_of_the_reported_context_is_complete(make_foreign, read, encode, caplog):
    engine = ForeignEngine(max_model_len=len(TEXT) + 12, info={"max_context_length": 4096})
    world = await make_foreign(engine)
    finished = await read(world, TEXT, max_tokens=100, ignore_end_token=True).complete(
        answer_to(encode(TEXT), 12, ignore_end=True)
    )
    assert finished.reason == pb.FINISH_REASON_CONTEXT_FULL
    assert f"ended an answer for length at {len(TEXT) + 12} tokens, it reports 4096" in caplog.text
