"""Reading of bodies: lax numbers and booleans, nulls, and answers that clients send back."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from frontend.api.http.bodies import body_error
from frontend.api.openai.chat_bodies import ChatBody
from frontend.api.openai.completion_bodies import CompletionBody
from frontend.text.chat.messages import ChatMessage, ToolCall

HELLO = [{"role": "user", "content": "hi"}]


def completion(**members: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "a", **members}))


def chat(**members: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": HELLO, **members}))


def turn(**message: Any) -> ChatMessage:
    (message_read,) = chat(messages=[message]).messages
    return message_read.as_turn()


@pytest.mark.parametrize(
    ("name", "sent", "read"),
    [
        ("max_tokens", 5.0, 5),
        ("max_tokens", "5", 5),
        ("seed", "-3", -3),
        ("temperature", "0.5", 0.5),
        ("temperature", 1, 1.0),
        ("stream", "true", True),
        ("stream", 1, True),
        ("stream", "off", False),
        ("ignore_eos", 0, False),
        ("stop_token_ids", ["3", 4.0], [3, 4]),
        ("logit_bias", {"3": "1.5"}, {3: 1.5}),
        ("logit_bias", [], {}),
        ("logprobs", False, None),
        ("logprobs", 0, 0),
        ("stop", "", None),
        ("response_format", {}, None),
        ("structured_outputs", {}, None),
        ("model", None, ""),
        ("model", "", ""),
    ],
)
def test_numbers_booleans_and_empty_values_are_read_leniently(name, sent, read):
    value = getattr(completion(**{name: sent}), name)
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(("prompt", "read"), [(["5", "6"], ["5", "6"]), ([5, 6], [5, 6]), ([[5], [6]], [[5], [6]])])
def test_texts_that_look_like_numbers_are_not_token_ids(prompt, read):
    assert completion(prompt=prompt).prompt == read


def test_parameters_that_ask_for_nothing_need_no_others():
    body = chat(stream_options={"include_usage": False}, top_logprobs=0, tool_choice="", tools=[])
    assert not body.tool_use.required


async def test_null_is_the_model_that_is_served(http_pair, client):
    answer = await client.chat.completions.create(model=None, messages=HELLO)  # type: ignore[arg-type]
    assert answer.model == "fake"


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (None, ""),
        ("a", "a"),
        ([], ()),
        (["a", {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}], ("a", "b")),
        ([{"type": "text", "text": None}, {"type": "output_text", "text": "a", "annotations": []}], ("", "a")),
        ([{"type": "refusal", "refusal": "no"}], ("no",)),
    ],
)
def test_content_is_a_text_or_parts(content, read):
    assert turn(role="user", content=content).content == read


def test_members_that_gateways_add_to_messages_are_ignored():
    message = turn(
        role="assistant",
        content=None,
        id="msg_1",
        refusal=None,
        annotations=[],
        audio=None,
        function_call=None,
        provider_specific_fields={"refusal": None},
        reasoning_details=[{"type": "reasoning.text", "text": "hm"}],
        cache_control={"type": "ephemeral"},
        tool_calls=[
            {
                "id": "call_1",
                "index": 0,
                "type": "function",
                "function": {"name": "f", "arguments": "{}", "provider_specific_fields": None},
                "provider_specific_fields": {"thought_signature": "x"},
            }
        ],
    )
    assert message == ChatMessage("assistant", "", tool_calls=(ToolCall("call_1", "f", "{}"),))


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_of_calls_are_a_text_or_an_object(arguments):
    message = turn(role="assistant", tool_calls=[{"id": None, "function": {"name": "f", "arguments": arguments}}])
    assert message.tool_calls == (ToolCall("", "f", '{"a": 1}'),)


def test_deprecated_function_call_is_read_as_a_call():
    message = turn(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert message.tool_calls == (ToolCall("", "f", "{}"),)


def test_small_body_that_is_nested_too_deeply_is_refused_with_the_limit():
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate_json('{"prompt": "x", "metadata": ' + "[" * 5_000)
    assert str(body_error(caught.value)) == "the body's JSON is nested more than 128 levels deep"
