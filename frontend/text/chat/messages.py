"""The input of a chat template: messages, tools and options. Knows neither templates nor protos."""

import json
from collections.abc import Mapping
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
    return {"reasoning_effort": effort, **thinking_variables(thinks=effort not in ("none", "minimal"))}


def thinking_variables(*, thinks: bool) -> dict[str, Any]:
    """Returns template variables for whether to think: Qwen and GLM read the first, DeepSeek and Granite the second."""
    return {"enable_thinking": thinks, "thinking": thinks}
