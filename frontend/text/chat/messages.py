"""A conversation as a chat template is given it: turns, tools, how the prompt ends. Knows no template and no proto."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made in an earlier turn.

    Attributes:
        call_id: which the tool's answer names.
        name: of the tool.
        arguments: a JSON object as text, as clients receive and send it.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: who speaks: "system", "user", "assistant", "tool", or what the model's template knows.
        content: what is said; several pieces of text for clients that send a list of parts.
        name: of the speaker, or of the tool that answers.
        reasoning: what an assistant thought before it spoke.
        tool_calls: what an assistant asked for.
        tool_call_id: the call that a tool answers.
    """

    role: str
    content: str | tuple[str, ...] = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def num_chars(self) -> int:
        """Characters of everything a template may show."""
        content = len(self.content) if isinstance(self.content, str) else sum(map(len, self.content))
        calls = sum(len(call.call_id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.role) + content + len(self.name) + len(self.reasoning) + calls + len(self.tool_call_id)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a conversation's prompt holds besides its turns.

    Attributes:
        tools: that the model may call: JSON objects, given to the template as they are, in OpenAI's form
            {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}.
        template_kwargs: further variables for the template, as in {"enable_thinking": false}; JSON values.
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: end the prompt inside the last turn, which the model goes on with; no turn is opened.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_chars(self) -> int:
        """Characters of tools and variables as JSON."""
        return sum(
            len(json.dumps(value, ensure_ascii=False)) for value in (*self.tools, *self.template_kwargs.values())
        )


def reasoning_variables(effort: str) -> dict[str, Any]:
    """Template variables for an effort of reasoning, as clients name it: "none", "minimal", "low", "medium", "high".

    Some templates know the effort itself, others only whether to think at all; without an effort they decide.
    """
    if not effort:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}


def template_messages(
    messages: Sequence[ChatMessage], *, content_as_parts: bool, text_as_parts: bool, knows_developer: bool = True
) -> list[Any]:
    """The turns as templates know them: dictionaries with "role" and "content", and more where there is more.

    Args:
        messages: the turns, oldest first.
        content_as_parts: give several pieces of text as a list of parts; else as lines of one text.
        text_as_parts: give a single text, too, as a list of one part.
        knows_developer: "developer" is a role of its own; else it is "system", which it has replaced for newer models.
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
    if message.reasoning:  # under every name that templates read it by
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
    """As an object where they are one: templates write JSON themselves, and a text would be quoted once more."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments
