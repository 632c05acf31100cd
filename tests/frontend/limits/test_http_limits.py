"""Limits on sizes and counts over HTTP: a request at the limit passes, one above is refused with the numbers."""

import asyncio
import io
import json
import re

import aiohttp
import pytest
import pytest_asyncio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


def completion(**fields):
    return COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields}


def chat(**fields):
    return CHAT, {"messages": [{"role": "u", "content": "x"}], "max_tokens": 1, **fields}


LIMITS = {
    "prompt in tokens": (lambda n: completion(prompt="x" * n), 4095, 4096, "has 4096 tokens", "prompt"),
    "token ids": (lambda n: completion(prompt=[1] * n), 4095, 4096, "has 4096 tokens", "prompt"),
    "token id": (lambda n: completion(prompt=[n]), 257, 258, "token id 258, the vocabulary has 258", "prompt"),
    "prompts": (lambda n: completion(prompt=["x"] * n), 2048, 2049, "has 2049 entries, at most 2048", "prompt"),
    "answers": (lambda n: completion(n=n), 128, 129, "n is 129, .* at most 128", "n"),
    "answers of a chat": (lambda n: chat(n=n), 128, 129, "n is 129, .* at most 128", "n"),
    "cache salt": (lambda n: completion(cache_salt="x" * n), 128, 129, "129 .* at most 128", "cache_salt"),
    "request id": (lambda n: completion(request_id="x" * n), 114, 115, "at most 114", "request_id"),
    "biased id": (lambda n: completion(logit_bias={str(n): 1}), 257, 258, "token id 258, .* 258", "logit_bias"),
    "bad words": (lambda n: completion(bad_words=["w"] * n), 64, 65, "65 .* at most 64", "bad_words"),
    "bad word": (lambda n: completion(bad_words=["x" * n]), 256, 257, "257 bytes .* at most 256", "bad_words"),
    "allowed id": (lambda n: completion(allowed_token_ids=[n]), 257, 258, "token id 258", "allowed_token_ids"),
    "logprobs": (lambda n: completion(logprobs=n), 20, 21, "is 21, .* at most 20", "logprobs"),
    "top_logprobs": (lambda n: chat(logprobs=True, top_logprobs=n), 20, 21, "is 21, .* at most 20", "top_logprobs"),
    "prompt logprobs": (lambda n: completion(prompt_logprobs=n), 20, 21, "is 21, .* at most 20", "prompt_logprobs"),
    "stop texts": (lambda n: completion(stop=["a"] * n), 16, 17, "17 .* at most 16", "stop"),
    "stop text": (lambda n: completion(stop="a" * n), 256, 257, "257 bytes .* at most 256", "stop"),
    "stop ids": (lambda n: completion(stop_token_ids=[9] * n), 64, 65, "65 .* at most 64", "stop_token_ids"),
    "max_tokens": (lambda n: completion(max_tokens=n), 4095, 4096, "max_tokens is 4096", "max_tokens"),
    "min_tokens": (lambda n: completion(min_tokens=n, max_tokens=5), 5, 6, "is 6, .* at most 5", "min_tokens"),
    "tools": (lambda n: chat(tools=[TOOL] * n, tool_choice="none"), 128, 129, "at most 128 .* 129", "tools"),
    "timeout": (lambda n: completion(timeout=n), 86400, 86401, "is 86401.* at most 86400", "timeout"),
    "choices": (
        lambda n: completion(structured_outputs={"choice": [str(i) for i in range(n)]}),
        1000,
        1001,
        "1001 .* at most 1000",
        "structured_outputs",
    ),
}
BEFORE_WORK = {  # what is at the limit here is refused later, for what it costs
    "characters": (lambda n: completion(prompt="x" * n), 32768, 32769, "32769 characters, at most 32768", "prompt"),
    "characters of a chat": (
        lambda n: chat(messages=[{"role": "u", "content": "x" * (n - 1)}]),
        32768,
        32769,
        "32769 characters, at most 32768",
        "messages",
    ),
    "messages": (
        lambda n: chat(messages=[{"role": "u", "content": ""}] * n),
        4096,
        4097,
        "4097 .* at most 4096",
        "messages",
    ),
    "biases": (
        lambda n: completion(logit_bias=dict.fromkeys(map(str, range(n)), 1)),
        300,
        301,
        "301 .* at most 300",
        "logit_bias",
    ),
}


@pytest_asyncio.fixture(loop_scope="module")
async def post(pair):
    """post((path, body)) -> status and JSON of the answer."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{pair.app.http_port}") as session:

        async def send(request):
            path, body = request
            data = io.BytesIO(json.dumps(body).encode())
            async with session.post(path, data=data, headers={"content-type": "application/json"}) as response:
                return response.status, await response.json()

        yield send


@pytest.mark.parametrize("name", LIMITS)
async def test_at_the_limit_passes_and_one_above_is_refused_with_the_numbers(post, name):
    make, limit, above, message, param = LIMITS[name]
    status, answer = await post(make(limit))
    assert status == 200, answer
    check(await post(make(above)), message, param)


@pytest.mark.parametrize("name", BEFORE_WORK)
async def test_one_above_is_refused_before_any_work(post, name):
    make, limit, above, message, param = BEFORE_WORK[name]
    check(await post(make(above)), message, param)
    _, answer = await post(make(limit))
    assert not re.search(message, answer.get("error", {}).get("message", ""))


def check(outcome, message, param):
    status, answer = outcome
    assert status == 400
    assert re.search(message, answer["error"]["message"]), answer
    assert answer["error"]["param"] == param


async def test_a_body_may_have_8_mib(post):
    path, body = completion(metadata={"a": "u" * (3 << 20), "b": "u" * (3 << 20), "c": ""})
    size = (8 << 20) - len(json.dumps(body))
    body["metadata"]["c"] = "u" * size
    assert (await post((path, body)))[0] == 200
    body["metadata"]["c"] += "u"
    status, answer = await post((path, body))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert str(8 << 20) in answer["error"]["message"]


async def test_tokenize_and_detokenize_have_bounds_too(post):
    status, answer = await post(("/tokenize", {"prompt": "x" * 32769}))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert (await post(("/tokenize", {"prompt": "x" * 32768})))[1]["count"] == 32768
    check(await post(("/detokenize", {"tokens": [1] * 4097})), "4097 entries, at most 4096", "tokens")
    assert (await post(("/detokenize", {"tokens": [1] * 4096})))[0] == 200


async def test_generation_without_a_deadline_gets_the_servers_default(skip, make_pair):
    pair = await make_pair(http=True, default_timeout_s=20.0)
    pair.engine.pause()
    url = f"http://127.0.0.1:{pair.app.http_port}/v1/completions"
    bodies = [{"stream": False}, {"stream": True}, {"timeout": 50}]
    async with aiohttp.ClientSession() as session:
        for count, body in enumerate(bodies, 1):
            call = asyncio.ensure_future(session.post(url, json={"prompt": "x", **body}))
            await pair.engine.wait_for(lambda count=count: len(pair.engine.submissions) == count)
            skip(50.0)
            async with await call as response:
                assert response.status == 504
                assert (await response.json())["error"]["code"] == "deadline_exceeded"
    first, second, third = (submission.remaining_ms for submission in pair.engine.submissions)
    assert 0 < first <= 20_000
    assert 0 < second <= 20_000 < third <= 50_000
