"""Converts conversations from the public proto, and parses their JSON texts."""

import json
from math import isfinite
from typing import Any

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.json_levels import json_levels
from frontend.limits import MAX_JSON_DEPTH, MAX_TOOLS
from frontend.request.checks import check_at_most
from frontend.request.request import ChatPrompt
from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall


def chat_prompt(message: pb.ChatPrompt, path: str) -> ChatPrompt:
    """Converts a conversation; `convert.check_chat` checks its messages.

    Args:
        path: path of `message` in the request, such as "spec.chat.", for error messages.

    Raises:
        InvalidRequest: a field is not a JSON object, is nested too deeply or has a number that is not finite; fields
            exclude each other, or there are too many tools.
    """
    check_at_most(path + "tools_json", len(message.tools_json), MAX_TOOLS, "entries")
    if message.continue_final_message and message.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message continues the last turn, add_generation_prompt opens another: set only one of them",
            field=path + "continue_final_message",
        )
    opens_turn = message.add_generation_prompt if message.HasField("add_generation_prompt") else True
    return ChatPrompt(
        tuple(_turn(turn) for turn in message.messages),
        ChatOptions(
            tools=tuple(_object(path + "tools_json", text) for text in message.tools_json),
            template_kwargs=_object(path + "template_variables_json", message.template_variables_json or "{}"),
            add_generation_prompt=opens_turn and not message.continue_final_message,
            continue_final_message=message.continue_final_message,
        ),
    )


def _turn(turn: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        turn.role,
        turn.content,
        name=turn.name,
        reasoning=turn.reasoning,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments_json) for call in turn.tool_calls),
        tool_call_id=turn.tool_call_id,
    )


def _object(field: str, text: str) -> dict[str, Any]:
    name = field.rpartition(".")[2]
    too_deep = InvalidRequest(f"{name} is nested more than {MAX_JSON_DEPTH} levels deep", field=field)
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}", field=field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {text.strip()[:64]}, it must be a JSON object", field=field)
    for depth, level in enumerate(json_levels(value), 1):
        if depth > MAX_JSON_DEPTH and any(isinstance(one, dict | list) for one in level):
            raise too_deep  # what works on the object later recurses
        if any(isinstance(one, float) and not isfinite(one) for one in level):
            raise InvalidRequest(f"{name} has a number that is not finite, such as 1e999 or NaN", field=field)
    return value
