"""Conversion of Responses requests to the turns that a chat template gets."""

import pytest

from frontend.api.openai.responses.bodies import ResponsesBody
from frontend.slices import at_once
from frontend.text.chat.messages import ChatMessage, ToolCall

CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
TURNS = [
    ChatMessage("system", "be brief"),
    ChatMessage("user", "hi"),
    ChatMessage("assistant", "Hello."),
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", tool_calls=(ToolCall("c1", "weather", '{"city": "Rome"}'),)),
    ChatMessage("tool", "sunny", name="weather", tool_call_id="c1"),
]
CLIENTS = {
    "LangChain": [
        {"content": "be brief", "role": "system", "type": "message"},
        {"content": "hi", "role": "user", "type": "message"},
        {
            "type": "message",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
            "role": "assistant",
            "id": "msg_1_0",
        },
        {"content": "Weather?", "role": "user", "type": "message"},
        {**CALL, "id": "fc_2_0", "status": "completed"},
        RESULT,
    ],
    "AI SDK": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}], "id": "msg_1_0"},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        CALL,
        RESULT,
    ],
    "openai": [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "id": "msg_1_0",
            "content": [{"annotations": [], "text": "Hello.", "type": "output_text", "logprobs": None}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        },
        {"role": "user", "content": "Weather?"},
        {**CALL, "id": "fc_2_0", "status": "completed", "async": None, "caller": None, "namespace": None},
        {**RESULT, "output": [{"type": "input_text", "text": "sunny"}]},
    ],
}


@pytest.mark.parametrize("client", CLIENTS)
def test_equivalent_messages_become_the_same_turns(client):
    body = ResponsesBody.model_validate({"model": "m", "input": CLIENTS[client], "store": False})
    assert list(at_once(body.chat()).messages) == TURNS
    assert list(body.unknown_parameters()) == []


def test_reasoning_message_and_calls_of_one_answer_are_one_turn():
    items = [
        {"type": "reasoning", "id": "rs_0", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "Well."},
        CALL,
        {**CALL, "call_id": "c2"},
        RESULT,
        {**RESULT, "call_id": "c2"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "Sunny."},
    ]
    first, *results, last = at_once(ResponsesBody.model_validate({"input": items}).chat()).messages
    assert (first.reasoning, first.content, [call.call_id for call in first.tool_calls]) == (
        "hm",
        "Well.",
        ["c1", "c2"],
    )
    assert [(turn.role, turn.tool_call_id) for turn in results] == [("tool", "c1"), ("tool", "c2")]
    assert (last.reasoning, last.content) == ("so", "Sunny.")


def test_large_conversation_is_read_in_slices():
    body = ResponsesBody.model_validate({"input": [{"role": "user", "content": "x"}] * 1000})
    assert sum(1 for _ in body.chat()) >= 1000
