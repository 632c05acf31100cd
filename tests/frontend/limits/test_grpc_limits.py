"""Limits on sizes and counts over gRPC: a request at the limit passes, one above is refused with the numbers."""

import asyncio
import json
import re

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend import app
from frontend.generation.answer import prompt_echo
from tests.hang import HANG_S

TOOL = json.dumps({"type": "function", "function": {"name": "f"}})


def text(chars, **fields):
    return pb.GenerationSpec(text="x" * chars, **fields)


def ids(ids, max_tokens=None):
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), stop=pb.StopOptions(max_tokens=max_tokens))


def sampling(**options):
    return text(1, sampling=pb.SamplingOptions(**options))


def stop(**options):
    return text(1, stop=pb.StopOptions(**options))


def output(**options):
    return text(1, output=pb.OutputOptions(**options))


def chat(num_messages=1, content="", tools_json=(), variables=""):
    messages = [pb.ChatMessage(role="u", content=content)] * num_messages
    prompt = pb.ChatPrompt(messages=messages, tools_json=tools_json, template_variables_json=variables)
    return pb.GenerationSpec(chat=prompt, stop=pb.StopOptions(max_tokens=1))


def choice(count, chars=1):
    texts = [f"{i:0{chars}}" for i in range(count)]
    return text(1, structured_output=pb.StructuredOutput(choice=pb.Choices(texts=texts)))


def regex(num_bytes):
    return text(1, structured_output=pb.StructuredOutput(regex=f"[{'a' * (num_bytes - 2)}]"))


LIMITS = {
    "prompt in tokens": (text, 4095, 4096, "The prompt has 4096 tokens", "spec.prompt"),
    "token ids": (lambda n: ids([1] * n, 1), 4095, 4096, "The prompt has 4096 tokens", "spec.prompt"),
    "token id": (lambda n: ids([n]), 257, 258, "token id 258, the vocabulary has 258", "spec.token_ids"),
    "answers": (lambda n: text(1, num_answers=n), 128, 129, "num_answers is 129, .* at most 128", "spec.num_answers"),
    "request id": (lambda n: text(1, request_id="x" * n), 128, 129, "129 .* at most 128", "spec.request_id"),
    "cache salt": (lambda n: text(1, cache_salt="x" * n), 128, 129, "129 .* at most 128", "spec.cache_salt"),
    "biased id": (lambda n: sampling(logit_bias={n: 1}), 257, 258, "token id 258, .* 258", "spec.sampling.logit_bias"),
    "bad words": (
        lambda n: sampling(bad_words=[f"w{i}" for i in range(n)]),
        64,
        65,
        "65 .* at most 64",
        "spec.sampling.bad_words",
    ),
    "bad word": (
        lambda n: sampling(bad_words=["x" * n]),
        256,
        257,
        "257 bytes .* at most 256",
        "spec.sampling.bad_words",
    ),
    "allowed id": (
        lambda n: sampling(allowed_token_ids=[n]),
        257,
        258,
        "token id 258, .* 258",
        "spec.sampling.allowed_token_ids",
    ),
    "logprobs": (lambda n: output(top_logprobs=n), 20, 21, "is 21, .* at most 20", "spec.output.top_logprobs"),
    "prompt logprobs": (
        lambda n: output(prompt_logprobs=n),
        20,
        21,
        "is 21, .* at most 20",
        "spec.output.prompt_logprobs",
    ),
    "stop texts": (lambda n: stop(stop_texts=["a"] * n), 16, 17, "17 .* at most 16", "spec.stop.stop_texts"),
    "stop text": (lambda n: stop(stop_texts=["a" * n]), 256, 257, "257 bytes .* at most 256", "spec.stop.stop_texts"),
    "stop ids": (lambda n: stop(stop_token_ids=[9] * n), 64, 65, "65 .* at most 64", "spec.stop.stop_token_ids"),
    "stop id": (lambda n: stop(stop_token_ids=[n]), 257, 258, "token id 258, .* 258", "spec.stop.stop_token_ids"),
    "max_tokens": (lambda n: stop(max_tokens=n), 4095, 4096, "max_tokens is 4096", "spec.stop.max_tokens"),
    "min_tokens": (lambda n: stop(min_tokens=n, max_tokens=5), 5, 6, "min_tokens is 6, .* 5", "spec.stop.min_tokens"),
    "tools": (lambda n: chat(tools_json=[TOOL] * n), 128, 129, "129 .* at most 128", "spec.chat.tools_json"),
    "choices": (choice, 1000, 1001, "1001 .* at most 1000", "spec.structured_output.choice"),
    "constraint": (regex, 65536, 65537, "65537 bytes, at most 65536", "spec.structured_output.regex"),
    "constraint of choices": (
        lambda n: choice(64, n // 64),
        65536,
        65600,
        "65600 bytes, at most 65536",
        "spec.structured_output.choice",
    ),
}
BEFORE_WORK = {  # what is at the limit here is refused later, for what it costs
    "characters": (text, 32768, 32769, "has 32769 characters, at most 32768", "spec.text"),
    "characters of a chat": (
        lambda n: chat(content="x" * (n - 1)),
        32768,
        32769,
        "32769 characters, at most 32768",
        "spec.chat.messages",
    ),
    "characters of tools": (
        lambda n: chat(tools_json=["x" * n]),
        32768,
        32769,
        "32769 characters, at most 32768",
        "spec.chat.tools_json",
    ),
    "characters of variables": (
        lambda n: chat(variables="x" * n),
        32768,
        32769,
        "32769 characters, at most 32768",
        "spec.chat.tools_json",
    ),
    "messages": (chat, 4096, 4097, "messages has 4097 messages, at most 4096", "spec.chat.messages"),
    "biases": (
        lambda n: sampling(logit_bias=dict.fromkeys(range(n), 1)),
        300,
        301,
        "301 .* at most 300",
        "spec.sampling.logit_bias",
    ),
    "allowed ids": (
        lambda n: sampling(allowed_token_ids=range(n)),
        65536,
        65537,
        "65537 .* at most 65536",
        "spec.sampling.allowed_token_ids",
    ),
}


async def refused(pair, spec):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    return caught.value


@pytest.mark.parametrize("name", LIMITS)
async def test_at_the_limit_passes_and_one_above_is_refused_with_the_numbers(pair, name):
    make, limit, above, message, field = LIMITS[name]
    await pair.stub().Generate(pb.GenerateRequest(spec=make(limit)))
    error = await refused(pair, make(above))
    check(error, message, field)


@pytest.mark.parametrize("name", BEFORE_WORK)
async def test_one_above_is_refused_before_any_work(pair, name):
    make, limit, above, message, field = BEFORE_WORK[name]
    check(await refused(pair, make(above)), message, field)
    assert not re.search(message, (await refused(pair, make(limit))).details())


def check(error, message, field):
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search(message, error.details()), error.details()
    (trailer,) = (value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    assert field.encode() in trailer


async def test_echo_and_prompt_logprobs_are_limited_to_one_message(pair, monkeypatch):
    assert (prompt_echo.MAX_PROMPT_LOGPROBS, prompt_echo.MAX_ECHO_BYTES) == (1 << 18, 8 << 20)
    monkeypatch.setattr(prompt_echo, "MAX_PROMPT_LOGPROBS", 42)
    monkeypatch.setattr(prompt_echo, "MAX_ECHO_BYTES", 20)
    scores, echo = pb.OutputOptions(prompt_logprobs=20), pb.OutputOptions(echo=True)
    await pair.stub().Generate(pb.GenerateRequest(spec=text(2, output=scores)))
    check(await refused(pair, text(3, output=scores)), "63 .* at most 42", "spec.output.prompt_logprobs")
    await pair.stub().Generate(pb.GenerateRequest(spec=text(18, output=echo)))
    check(await refused(pair, text(19, output=echo)), "21 bytes .* at most 20", "spec.output.echo")


async def test_count_tokens_has_the_same_bound_on_characters(pair):
    with pytest.raises(grpc.aio.AioRpcError, match="has 32769 characters, at most 32768"):
        await pair.stub().CountTokens(pb.CountTokensRequest(text="x" * 32769))
    assert (await pair.stub().CountTokens(pb.CountTokensRequest(text="x" * 32768))).num_tokens == 32768


async def test_metadata_may_have_16_kib(pair):
    async def get(size):
        return await pair.stub().GetModel(pb.GetModelRequest(), metadata=[("x-large", "v" * size)])

    await get(15 << 10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(17 << 10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await get(1)  # on the same connection


async def test_a_message_may_have_8_mib(pair):
    stub = pair.stub(("grpc.max_send_message_length", -1))
    with pytest.raises(grpc.aio.AioRpcError, match="text has 8388598 bytes of UTF-8, at most 3145728"):
        await stub.CountTokens(pb.CountTokensRequest(text="x" * ((8 << 20) - 10)))
    with pytest.raises(grpc.aio.AioRpcError, match=rf"\({(8 << 20) + 6} vs\. {8 << 20}\)") as caught:
        await stub.CountTokens(pb.CountTokensRequest(text="x" * ((8 << 20) + 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_streams_per_connection_are_limited_and_other_connections_are_not_affected(make_pair, monkeypatch):
    monkeypatch.setattr(app, "_MAX_STREAMS_PER_CONNECTION", 64)
    pair = await make_pair()
    pair.engine.pause()
    crowded = pair.stub()
    request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="x"))
    await crowded.GetModel(pb.GetModelRequest())  # after which the client knows the limit
    calls = [crowded.StreamGenerate(request) for _ in range(65)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 64)
    await pair.stub().GetModel(pb.GetModelRequest())  # another connection
    await crowded_is_full(crowded)
    assert pair.app.calls.num_active == 64
    calls[0].cancel()
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 65)
    for call in calls:
        call.cancel()


async def crowded_is_full(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb.GetModelRequest(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_request_that_does_not_arrive_is_given_up(make_pair):
    pair = await make_pair(stall_timeout_s=0.2)
    call = pair.channel().stream_stream("/chairlift.v1.GenerationService/StreamGenerate")()
    assert await call.code() is grpc.StatusCode.ABORTED
    assert await call.details() == "the request has not arrived within 0.2 s"


async def test_silent_connection_is_closed(make_pair, monkeypatch):
    monkeypatch.setattr(app, "_HANDSHAKE_TIMEOUT_S", 0.3)
    pair = await make_pair()
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.port)
    async with asyncio.timeout(HANG_S):
        await reader.read()  # ends when the server closes
    writer.close()


async def test_generation_without_a_deadline_gets_the_servers_default(skip, make_pair):
    pair = await make_pair(default_timeout_s=20.0)
    pair.engine.pause()
    spec = pb.GenerationSpec(text="x")
    calls = [pair.stub().Generate(pb.GenerateRequest(spec=spec))]
    calls.append(pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec)))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 2)
    assert all(0 < submission.remaining_ms <= 20_000 for submission in pair.engine.submissions)
    skip(50.0)
    for call in calls:
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "before its answer was complete" in await call.details()
    call = pair.stub().Generate(pb.GenerateRequest(spec=spec), timeout=50)
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 3)
    assert pair.engine.submissions[2].remaining_ms > 20_000  # the client's own goes before
    call.cancel()
