"""Bodies bent in every field: each gets an answer or an error object, never a 500; good streams go on beside them."""

import asyncio
import copy
import itertools
import json
import os
import random

import aiohttp
import pytest
from pydantic import ValidationError

from frontend.convert import generation_request
from frontend.defaults import SamplingDefaults
from frontend.errors import RequestError
from frontend.openai.bodies import CompletionBody, DetokenizeBody, body_error
from frontend.openai.chat_bodies import ChatBody, TokenizeBody
from frontend.openai.error_object import BodyError, error_object
from frontend.openai.spec import chat_spec, completion_specs
from frontend.served_model import ServedModel
from frontend.testing_tokenizer import byte_tokenizer_files
from frontend.tokenizer import Tokenizer

NUM_CASES = int(os.environ.get("CHAIRLIFT_FUZZ_CASES", "1000"))
NUM_CONNECTIONS = 8

CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
COMPLETION = {"model": "fake", "prompt": "abc", "max_tokens": 4, "stream": True, "n": 2, "stop": ["x"], "logprobs": 2}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ],
    "max_completion_tokens": 4,
    "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "logprobs": True,
    "top_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
}
BASES = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "echo": True, "logit_bias": {"3": 1.5}}),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
FIELDS = sorted(
    {"best_of", "response_format", "function", "role", "content", "name"}
    | {name for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}
)
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 300, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 1e300, -1e-300),
    *("", "a", "é☃", "\u0000", "\ud800", "x" * 300, "auto", "required", "fake", "{{ 7 * 7 }}", "<|end|>", "\r\n"),
    *([], [[]], [0], [-1], [257], [258], ["a"], [None], [1, "a"], [[1], "a"], {}, {"a": 1}, {"1": 1}, {"-1": 200}),
    *([{}], {"type": "function"}, [{"type": "text", "text": "x"}], [{"role": "user", "content": "x"}], [[[[[[]]]]]]),
    float("nan"),
    float("inf"),
]


def bent(rng, body):
    """A copy with one to three changes anywhere in it."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        node = body
        while isinstance(node, (dict, list)) and node and rng.random() < 0.6:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], (dict, list)):
                break
            node = node[key]
        value = copy.deepcopy(rng.choice(VALUES))
        if isinstance(node, list):
            node.insert(rng.randint(0, len(node)), value)
        elif rng.random() < 0.2 and node:
            del node[rng.choice(list(node))]
        else:
            node[rng.choice([*node, rng.choice(FIELDS)])] = value
    return body


def garbled(rng, data):
    """Sometimes with a few bytes changed, cut off, or doubled."""
    if rng.random() < 0.85:
        return data
    start = rng.randrange(len(data))
    return rng.choice([data[:start], data[:start] + rng.randbytes(3) + data[start + 2 :], data + data[start:]])


async def test_no_body_makes_a_500_or_disturbs_others(http_pair, client):
    rng = random.Random(6)
    cases = []
    for _ in range(NUM_CASES):
        path, base = rng.choice(BASES)
        cases.append((path, garbled(rng, json.dumps(bent(rng, base)).encode())))
    statuses = []

    async def play(session):
        while cases:
            path, data = cases.pop()
            url = f"http://127.0.0.1:{http_pair.app.http_port}{path}"
            async with session.post(url, data=data, headers={"content-type": "application/json"}) as response:
                text = await response.text()
            statuses.append(response.status)
            assert response.status in (200, 400, 404), (path, data, text)
            if response.status != 200:
                assert json.loads(text)["error"]["message"], (path, data, text)
            assert '"code":"internal_error"' not in text, (path, data, text)

    async def good():
        while cases:
            stream = await client.completions.create(model="fake", prompt="undisturbed", stream=True)
            assert "".join([event.choices[0].text async for event in stream]) == "undisturbed"

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        group.create_task(good())
        for _ in range(NUM_CONNECTIONS):
            group.create_task(play(session))
    assert len(statuses) == NUM_CASES
    assert NUM_CASES // 20 < statuses.count(200) < NUM_CASES


@pytest.fixture
def model():
    tokenizer = Tokenizer.from_files(byte_tokenizer_files())
    yield ServedModel("fake", "none", 4096, 258, (256,), 20, tokenizer, SamplingDefaults())
    tokenizer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_value_of_every_parameter_is_taken_or_refused(path, model):
    base = COMPLETION if path == "/v1/completions" else CHAT
    refusals = []
    for name, value in itertools.product(FIELDS, VALUES):
        data = json.dumps({**base, name: value})
        try:
            if base is COMPLETION:
                spec = completion_specs(CompletionBody.model_validate_json(data), "id")[0]
                generation_request(spec, model)
            else:
                body = ChatBody.model_validate_json(data)
                generation_request(chat_spec(body, "id"), model, body.prompt_of(body.messages))
        except ValidationError as error:
            refusals.append(body_error(error))
        except (BodyError, RequestError) as error:
            refusals.append(error)
    assert {error_object(error).status for error in refusals} == {400, 404}
    num_cases = len(FIELDS) * len(VALUES)
    assert num_cases // 2 < len(refusals) < num_cases
