"""The parts of a chat answer (content, reasoning, tool calls) as OpenAI's objects."""

from collections.abc import Iterable

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.response_builder import JsonObject


def delta_objects(
    chunk: pb.Chunk, calls: Iterable[pb.ToolCallDelta], *, with_reasoning: bool = True
) -> list[JsonObject]:
    """The deltas of a stream that a chunk becomes, one for each part.

    Args:
        calls: news of those of its calls that the client wants.
        with_reasoning: whether it wants that too.
    """
    deltas: list[JsonObject] = []
    if chunk.reasoning and with_reasoning:
        deltas.append({"reasoning_content": chunk.reasoning})
    if chunk.text:
        deltas.append({"content": chunk.text})
    return deltas + [{"tool_calls": [_call_delta(call)]} for call in calls]


def message_object(
    answer: pb.GenerateResponse | pb.Answer, calls: Iterable[pb.ToolCall], *, with_reasoning: bool = True
) -> JsonObject:
    """The message of a whole answer.

    Args:
        calls: those of its calls that the client wants.
        with_reasoning: whether it wants that too.
    """
    tool_calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
        for call in calls
    ]
    content = answer.text if answer.text or not tool_calls else None
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning and with_reasoning:
        message["reasoning_content"] = answer.reasoning
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _call_delta(call: pb.ToolCallDelta) -> JsonObject:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments_json}}
    function = {"name": call.name, "arguments": call.arguments_json}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
