"""A conversation of the public proto, with tools and calls, becomes the one the template is given."""

import json
from typing import Any

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.request.convert_chat import chat_prompt
from frontend.request.request import ChatPrompt
from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_every_field_arrives() -> None:
    message = pb.ChatPrompt(
        messages=[
            pb.ChatMessage(role="user", content="hi", name="ann"),
            pb.ChatMessage(
                role="assistant",
                reasoning="hm",
                tool_calls=[pb.ToolCall(id="c1", name="weather", arguments_json='{"at": "Oslo"}')],
            ),
            pb.ChatMessage(role="tool", content="rain", name="weather", tool_call_id="c1"),
        ],
        tools_json=[json.dumps(TOOL)],
        template_variables_json='{"enable_thinking": false}',
        add_generation_prompt=False,
    )
    assert chat_prompt(message, "") == ChatPrompt(
        (
            ChatMessage("user", "hi", name="ann"),
            ChatMessage("assistant", reasoning="hm", tool_calls=(ToolCall("c1", "weather", '{"at": "Oslo"}'),)),
            ChatMessage("tool", "rain", name="weather", tool_call_id="c1"),
        ),
        ChatOptions((TOOL,), {"enable_thinking": False}, add_generation_prompt=False),
    )


@pytest.mark.parametrize(
    ("fields", "opens_turn"),
    [({}, True), ({"add_generation_prompt": True}, True), ({"continue_final_message": True}, False)],
)
def test_assistants_message_is_opened_unless_the_last_one_continues(fields: dict[str, Any], opens_turn: bool) -> None:
    options = chat_prompt(pb.ChatPrompt(**fields), "").options
    assert options.add_generation_prompt is opens_turn
    assert options.continue_final_message is ("continue_final_message" in fields)


def deep(num_levels: int) -> str:
    return '{"a": ' + "[" * (num_levels - 1) + "]" * (num_levels - 1) + "}"


def test_object_may_have_as_many_levels_as_a_body() -> None:
    assert chat_prompt(pb.ChatPrompt(tools_json=[deep(128)], template_variables_json=deep(128)), "").options.tools


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tools_json": ["{"]}, "spec.chat.tools_json", "tools_json is not valid JSON"),
        ({"tools_json": ["[" * 100_000]}, "spec.chat.tools_json", "tools_json is nested more than 128 levels deep"),
        ({"tools_json": [deep(129)]}, "spec.chat.tools_json", "tools_json is nested more than 128 levels deep"),
        ({"template_variables_json": deep(975)}, "spec.chat.template_variables_json", "nested more than 128 levels"),
        ({"tools_json": ["{}", "[]"]}, "spec.chat.tools_json", r"tools_json is \[\], it must be a JSON object"),
        (
            {"template_variables_json": "null"},
            "spec.chat.template_variables_json",
            "template_variables_json is null, it must be a JSON object",
        ),
        ({"tools_json": ['{"a": [0.5, 1e999]}']}, "spec.chat.tools_json", "tools_json has a number that is not finite"),
        ({"template_variables_json": '{"a": NaN}'}, "spec.chat.template_variables_json", "such as 1e999 or NaN"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "spec.chat.continue_final_message",
            "set only one of them",
        ),
    ],
)
def test_field_that_is_not_a_json_object_is_named(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        chat_prompt(pb.ChatPrompt(**fields), "spec.chat.")
    assert caught.value.field == field
