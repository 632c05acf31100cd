"""Large bodies are parsed in slices, with the same result as small ones."""

import json
from array import array

import pytest

from frontend import limits
from frontend.api.anthropic.bodies import MessagesBody
from frontend.api.http import request_body as incoming
from frontend.api.http.errors import BodyError
from frontend.api.http.request_body import parsed_body
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.completion_bodies import CompletionBody
from frontend.api.openai.responses.bodies import ResponsesBody

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
]
BODIES = {
    "chat": (
        ChatBody,
        {"messages": MESSAGES * 5, "temperature": 0.5, "tools": [TOOL]},
    ),
    "texts": (CompletionBody, {"prompt": ["a", "b"], "logit_bias": {"5": 1}, "stop": ["x"], "echo": True}),
    "few ids": (CompletionBody, {"prompt": [1, 2, 3], "stop_token_ids": [7]}),
}
WRONG = {
    "role": (ChatBody, {"messages": [*MESSAGES, {"role": 5}]}),
    "no messages": (ChatBody, {"messages": "hello"}),
    "prompt": (CompletionBody, {"prompt": {"a": 1}}),
    "bias": (CompletionBody, {"prompt": "a", "logit_bias": {"x": 1}}),
    "list": (CompletionBody, []),
}


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(limits, "SMALL_REQUEST_BYTES", 0)
    monkeypatch.setattr(incoming, "_LIGHT_BYTES", 0)


@pytest.mark.parametrize("name", BODIES)
async def test_large_body_is_read_as_a_small_one(name, everything_is_large):
    kind, body = BODIES[name]
    data = json.dumps(body).encode()
    assert await parsed_body(data, kind) == kind.model_validate_json(data)


@pytest.mark.parametrize("name", WRONG)
async def test_large_body_gets_the_error_of_a_small_one(name, monkeypatch):
    kind, body = WRONG[name]
    data = json.dumps(body).encode()
    with pytest.raises(BodyError) as small:
        await parsed_body(data, kind)
    monkeypatch.setattr(limits, "SMALL_REQUEST_BYTES", 0)
    monkeypatch.setattr(incoming, "_LIGHT_BYTES", 0)
    with pytest.raises(BodyError) as large:
        await parsed_body(data, kind)
    message = small.value.message.replace("valid array", "valid list")  # pydantic's word for it in JSON
    assert (large.value.message, large.value.param) == (message, small.value.param)


CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 0.5}}}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 0.5}}]}
WITH_NUMBERS = [
    (ChatBody, {"messages": [], "tools": [{**TOOL, "x": [0.5]}]}),
    (ChatBody, {"messages": [], "chat_template_kwargs": {"x": {"y": 0.5}}}),
    (ChatBody, {"messages": [*MESSAGES, CALLED]}),
    (CompletionBody, {"prompt": "a", "guided_json": {"maximum": 0.5}}),
    (ResponsesBody, {"input": "a", "metadata": {"x": 0.5}}),
    (ResponsesBody, {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"maximum": 0.5}}}}),
    (ResponsesBody, {"input": "a", "text": {"format": {"type": "text", "x": 0.5}}}),
    (MessagesBody, {"max_tokens": 1, "messages": [USED]}),
]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("kind", "body"), WITH_NUMBERS)
async def test_numbers_that_json_cannot_hold_are_refused(kind, body, large, request):
    if large:
        request.getfixturevalue("everything_is_large")
    data = json.dumps(body).encode()
    assert await parsed_body(data, kind)
    for number in (b"1e999", b"-1e999", b"NaN", b"Infinity"):
        with pytest.raises(BodyError, match="has a number that is not finite") as caught:
            await parsed_body(data.replace(b"0.5", number), kind)
        assert caught.value.param == list(body)[-1]


async def test_long_lists_of_ids_are_arrays_in_the_body():
    ids = [i % 250 for i in range(50_000)]
    body = await parsed_body(json.dumps({"prompt": ids}).encode(), CompletionBody)
    assert isinstance(body.prompt, array)
    assert list(body.prompt) == ids


async def test_parameters_that_are_serialized_again_are_limited():
    tool = {"type": "function", "function": {"name": "f", "description": "d" * (600 << 10)}}
    with pytest.raises(BodyError, match=r"tools has 6.* bytes, at most 524288 are allowed") as caught:
        await parsed_body(json.dumps({"messages": MESSAGES, "tools": [tool]}).encode(), ChatBody)
    assert caught.value.param == "tools"
