"""Error responses, as OpenAI's client and a bare connection see them."""

import asyncio
import json

import openai
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.api.http import errors as error_object
from frontend.api.openai.completion_response import CompletionBuilder
from frontend.errors import RequestError
from frontend.limits import MAX_REQUEST_BYTES
from tests.support.frontend.fake_engine import rejection


async def refused(call):
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value


async def post(pair, path, body, *headers):
    """One request over a bare connection: status, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    head = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", "connection: close", *headers]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), json.loads(content) if content.startswith(b"{") else content


def all_errors(kind=RequestError):
    return [kind, *(error for child in kind.__subclasses__() for error in all_errors(child))]


def test_every_error_of_the_frontend_has_a_row():
    assert set(all_errors()) - {RequestError} == set(error_object._TABLE)


async def test_too_long_prompt_begins_as_clients_expect(shared_client):
    error = await refused(shared_client.completions.create(model="fake", prompt="x" * 5000, max_tokens=1))
    assert error.status_code == 400
    assert error.body["message"].startswith("This model's maximum context length is 4096 tokens")
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "prompt", "invalid_request_error")


async def test_too_large_max_tokens_is_named(shared_client):
    error = await refused(shared_client.completions.create(model="fake", prompt="x", max_tokens=5000))
    assert (error.status_code, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")


async def test_other_model_is_not_found(shared_client):
    error = await refused(shared_client.completions.create(model="gpt-4", prompt="x"))
    assert isinstance(error, openai.NotFoundError)
    assert (error.code, error.param) == ("model_not_found", "model")


CALLS = {
    "cmpl-": lambda client, **changes: client.completions.create(**{"model": "fake", "prompt": "x"} | changes),
    "chatcmpl-": lambda client, **changes: client.chat.completions.create(
        **{"model": "fake", "messages": [{"role": "user", "content": "x"}]} | changes
    ),
    "resp_": lambda client, **changes: client.responses.create(**{"model": "fake", "input": "x"} | changes),
}


@pytest.mark.parametrize("prefix", CALLS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", [{"model": "gpt-4"}, {"temperature": -1}, {"extra_body": {"top_p": "much"}}])
async def test_error_has_the_id_of_its_call(shared_client, prefix, stream, bad):
    call = CALLS[prefix](shared_client, stream=stream, extra_headers={"x-request-id": "mine"}, **bad)
    assert (await refused(call)).request_id == f"{prefix}mine"


@pytest.mark.parametrize("prefix", CALLS)
async def test_error_without_an_id_of_the_client_gets_a_new_one_each_time(shared_client, prefix):
    ids = {(await refused(CALLS[prefix](shared_client, model="gpt-4"))).request_id for _ in range(3)}
    assert len(ids) == 3
    assert all(request_id.startswith(prefix) for request_id in ids)


async def test_full_queue_is_429_with_retry_after(make_pair, connect):
    pair = await make_pair(http=True, max_queued_requests=1)
    pair.engine.pause()
    client = connect(pair)
    first = asyncio.ensure_future(client.completions.create(model="fake", prompt="x"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    error = await refused(client.completions.create(model="fake", prompt="x", stream=True))
    assert isinstance(error, openai.RateLimitError)
    assert error.code == "queue_full"
    assert int(error.response.headers["retry-after"]) >= 1
    assert int(error.response.headers["retry-after-ms"]) >= 1
    pair.engine.resume()
    assert (await first).choices[0].text == "x"


async def test_client_retries_what_the_engine_refuses_for_now(make_pair, connect):
    pair = await make_pair(http=True)
    pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_DRAINING, "stopping", retry_after_s=0)]
    answer = await connect(pair, max_retries=1).completions.create(model="fake", prompt="abc")
    assert answer.choices[0].text == "abc"
    assert len(pair.engine.submissions) == 2


async def test_without_an_engine_everything_is_503(make_pair, connect):
    pair = await make_pair(http=True)
    pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    while pair.app.engines.serving:
        await asyncio.sleep(0)
    client = connect(pair)
    for call in (client.completions.create(model="fake", prompt="x"), client.models.list()):
        error = await refused(call)
        assert (error.status_code, error.code) == (503, "engine_unavailable")


async def test_one_prompt_of_a_list_that_fails_ends_all(client, http_pair):
    http_pair.engine.rejections = [
        None,
        *(rejection(engine_pb.REJECTION_REASON_DRAINING, "stopping") if n in (0, 2) else None for n in range(3)),
    ]
    error = await refused(client.completions.create(model="fake", prompt=["aaaaaaaaaa", "b", "cccccccccc"]))
    assert error.status_code == 503
    await http_pair.idle()


async def test_error_after_the_first_token_is_an_event_that_the_client_raises(client, http_pair):
    http_pair.engine.pause()
    stream_call = asyncio.ensure_future(client.completions.create(model="fake", prompt="abc", stream=True))
    await http_pair.engine.wait_for(lambda: http_pair.engine.num_open == 1)
    await http_pair.engine.step()
    stream = await stream_call
    assert (await anext(stream)).choices[0].text == "a"
    await http_pair.engine.kill()
    with pytest.raises(openai.APIError, match="engine") as caught:
        await anext(stream)
    assert caught.value.code == "engine_unavailable"


async def test_defect_is_500_and_keeps_its_text_to_itself(client, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("frontend.request.convert.named_model", broken)
    error = await refused(client.completions.create(model="fake", prompt="x"))
    assert (error.status_code, error.code) == (500, "internal_error")
    assert "secret" not in error.message
    assert "secret detail" in caplog.text


async def test_defect_after_the_first_token_is_an_event(client, monkeypatch, caplog):
    sound = CompletionBuilder.events

    def broken(self, prompt_index, message):
        if message.HasField("finished"):
            raise ZeroDivisionError("secret detail")
        return sound(self, prompt_index, message)

    monkeypatch.setattr(CompletionBuilder, "events", broken)
    stream = await client.completions.create(model="fake", prompt="abc", stream=True)
    with pytest.raises(openai.APIError, match="internal error"):
        _ = [event async for event in stream]
    assert "secret detail" in caplog.text


BAD = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string"),
    ({"prompt": [258]}, "prompt", "vocabulary has 258"),
    ({"prompt": [-1]}, "prompt", "must be a string"),
    ({}, "prompt", "required"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature is -1"),
    ({"prompt": "a", "temperature": 1e300}, "temperature", "temperature is inf"),
    ({"prompt": "a", "temperature": float("nan")}, "temperature", "temperature is nan"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "repetition_penalty": 1e-38}, "repetition_penalty", "at least 0.1 and at most 10"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "a", "max_tokens": 2**40}, "max_tokens", "less than"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "integer"),
    ({"prompt": "a", "min_tokens": 30}, "min_tokens", "min_tokens is 30"),
    ({"prompt": "a", "n": 0}, "n", "greater than"),
    ({"prompt": "a", "seed": 2**64}, "seed", "less than"),
    ({"prompt": "a", "stop": [""]}, "stop", "empty"),
    ({"prompt": "a", "stop": {"a": 1}}, "stop", "stop"),
    ({"prompt": "a", "logprobs": 21, "echo": True}, "logprobs", "logprobs is 21"),
    ({"prompt": "a", "echo": 5}, "echo", "boolean"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"prompt": "a", "prompt_logprobs": 0.5}, "prompt_logprobs", "integer"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
    ({"prompt": "a", "prompt_logprobs": 1, "logprobs": 2, "echo": True}, "prompt_logprobs", "one width"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"prompt": "a", "logit_bias": {"300": 1}}, "logit_bias", "vocabulary"),
    ({"prompt": "a", "logit_bias": {"3": 1000}}, "logit_bias", "at most 100"),
    ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "vocabulary"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": ["5", 5]}, "prompt", "must be a string"),
    ({"prompt": [5.0]}, "prompt", "must be a string"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not served"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "not served"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not served"),
    ({"prompt": "a", "request_id": "a\r\nb"}, "request_id", "printable"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
async def test_bad_parameter_is_named(shared_pair, body, param, words):
    status, _, answer = await post(shared_pair, "/v1/completions", json.dumps(body).encode())
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]
    assert shared_pair.engine.submissions == []


async def test_parameters_without_effect_are_taken(shared_pair):
    body = {"prompt": "a", "best_of": 1, "suffix": "", "user": "me", "store": False, "metadata": {"a": "b"}}
    body |= {"response_format": {"type": "text"}, "logprobs": None, "unheard_of": None}
    status, _, answer = await post(shared_pair, "/v1/completions", json.dumps(body).encode())
    assert (status, answer["choices"][0]["text"]) == (200, "a")


NO_JSON = [b"", b"{", b"null", b"[]", b"5", b"\xff\xfe", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b"[" * 100_000]


@pytest.mark.parametrize("body", NO_JSON, ids=range(len(NO_JSON)))
async def test_body_that_is_no_json_object_is_400(shared_pair, body):
    status, _, answer = await post(shared_pair, "/v1/completions", body)
    assert status == 400
    assert "JSON" in answer["error"]["message"]


async def test_huge_body_is_413(shared_client):
    error = await refused(shared_client.completions.create(model="fake", prompt="x" * MAX_REQUEST_BYTES))
    assert (error.status_code, error.code) == (413, "body_too_large")
    assert (await shared_client.completions.create(model="fake", prompt="x")).choices[0].text == "x"


async def test_huge_body_in_chunks_is_413(shared_pair):
    reader, writer = await asyncio.open_connection("127.0.0.1", shared_pair.app.http_port)
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range((MAX_REQUEST_BYTES >> 20) + 1):
        writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        await writer.drain()
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_huge_headers_are_refused(shared_pair):
    status, _, _ = await post(shared_pair, "/v1/completions", b"{}", "x-filler: " + "x" * (80 << 10))
    assert status == 431


async def test_body_that_does_not_arrive_is_408(make_pair):
    pair = await make_pair(http=True, stall_timeout_s=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"prompt')
    assert b" 408 " in await reader.readline()
    writer.close()


async def test_only_json_is_taken(shared_pair):
    status, _, answer = await post(shared_pair, "/v1/completions", b"{}", "content-type: text/plain")
    assert status == 415
    assert "application/json" in answer["error"]["message"]


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models", 405), ("/", 404)])
async def test_unknown_path_and_method_have_an_error_object(shared_pair, path, status):
    answered, head, answer = await post(shared_pair, path, b"{}")
    assert answered == status
    assert path in answer["error"]["message"]
    assert (b"allow: " in head) == (status == 405)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/", "/v1/messages"),
        ("/completions/", "/v1/completions"),
        ("//v1/messages", "/v1/messages"),
    ],
)
async def test_a_base_url_without_or_with_a_second_v1_or_with_slashes_is_noticed(shared_pair, path, meant):
    status, _, answer = await post(shared_pair, path, b"{}")
    assert status == 404
    assert f"POST {path}: Not Found; did you mean {meant}?" in answer["error"]["message"]
