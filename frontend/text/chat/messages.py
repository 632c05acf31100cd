"""The input of a chat template: messages, tools and options. Knows neither templates nor protos."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the assistant made in an earlier message.

    Attributes:
        call_id: id that the tool's answer refers to.
        name: the tool's name.
        arguments: a JSON object as text.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant", "tool", or another role of the model's template.
        content: the text; several texts if the client sent a list of parts.
        name: name of the author, or of the tool that answers.
        reasoning: the assistant's reasoning before the content.
        tool_calls: the assistant's tool calls.
        tool_call_id: id of the call that a tool answers.
    """

    role: str
    content: str | tuple[str, ...] = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def num_chars(self) -> int:
        """Number of characters that a template may insert."""
        content = len(self.content) if isinstance(self.content, str) else sum(map(len, self.content))
        calls = sum(len(call.call_id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.role) + content + len(self.name) + len(self.reasoning) + calls + len(self.tool_call_id)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a conversation's prompt.

    Attributes:
        tools: tools that the model may call, as JSON objects in OpenAI's format, which the template gets unchanged:
            {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}.
        template_kwargs: further template variables with JSON values, for example {"enable_thinking": false}.
        add_generation_prompt: open the assistant's message at the end of the prompt.
        continue_final_message: end the prompt inside the last message, which the model continues.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_chars(self) -> int:
        """Number of characters of tools and variables as JSON."""
        return sum(
            len(json.dumps(value, ensure_ascii=False)) for value in (*self.tools, *self.template_kwargs.values())
        )


def reasoning_variables(effort: str) -> dict[str, Any]:
    """Returns template variables for a reasoning effort: "none", "minimal", "low", "medium" or "high".

    Some templates use the effort itself, others only whether to think. Without an effort, their default applies.
    """
    if not effort:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}


def template_messages(
    messages: Sequence[ChatMessage], *, content_as_parts: bool, text_as_parts: bool, knows_developer: bool = True
) -> list[Any]:
    """Converts messages to the dictionaries that templates expect, with "role", "content" and optional keys.

    Args:
        messages: oldest first.
        content_as_parts: pass several texts as a list of parts instead of joining them with line breaks.
        text_as_parts: pass a single text as a list with one part.
        knows_developer: whether the template knows the role "developer"; if not, it is replaced by "system".
    """
    turns = [_template_message(message, content_as_parts, text_as_parts) for message in messages]
    for turn in turns:
        if turn["role"] == "developer" and not knows_developer:
            turn["role"] = "system"
    return turns


def _template_message(message: ChatMessage, content_as_parts: bool, text_as_parts: bool) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, str):
        turn["content"] = [_part(message.content)] if text_as_parts else message.content
    else:
        turn["content"] = [_part(text) for text in message.content] if content_as_parts else "\n".join(message.content)
    if message.name:
        turn["name"] = message.name
    if message.reasoning:  # under all names that templates use
        turn |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _arguments(call: ToolCall) -> Any:
    """Returns the arguments as an object if they are one, because templates would quote a text once more."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments
