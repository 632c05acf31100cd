"""Bodies with a conversation: messages, tools and template options."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from frontend.api.http.bodies import Body, ConversationObject, Count, FreeObject, NoneIfEmpty, PositiveCount
from frontend.api.http.errors import BodyError
from frontend.api.http.tool_use import ToolUse, allowed_tools, required_tools
from frontend.api.http.unserved_parameters import is_off
from frontend.api.openai.completion_bodies import GenerationBody
from frontend.limits import MAX_CONTENT_PARTS, MAX_ID_CHARS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from frontend.request.request import ChatPrompt
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall, reasoning_variables


class TextPart(ConversationObject):
    """A text part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str | None = None

    @property
    def shown(self) -> str:
        """The text for the template."""
        return self.text or ""


class RefusalPart(ConversationObject):
    """A part with an assistant's refusal."""

    type: Literal["refusal"]
    refusal: str

    @property
    def shown(self) -> str:
        """See TextPart."""
        return self.refusal


class ThinkingPart(ConversationObject):
    """Reasoning as a part, as for Mistral's models: a text, or text parts."""

    type: Literal["thinking"]
    thinking: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)]

    @property
    def shown(self) -> str:
        """See TextPart."""
        return self.thinking if isinstance(self.thinking, str) else "".join(part.shown for part in self.thinking)


Part = str | Annotated[TextPart | RefusalPart | ThinkingPart, Field(discriminator="type")]
"""A part of a message's content: text only; images, audio and files are not served."""


class CalledFunction(ConversationObject):
    """A function call; the arguments are a JSON object, usually as a string."""

    name: str
    arguments: str | FreeObject | None = None

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments) if isinstance(self.arguments, dict) else self.arguments or ""


class Call(ConversationObject):
    """A call in an assistant's message."""

    id: str | None = None
    function: CalledFunction


class Message(ConversationObject):
    """A turn of a conversation.

    Unknown members are ignored: gateways add `provider_specific_fields`, `cache_control`,
    `reasoning_details` and more to the answers that clients send back.
    """

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=MAX_TOOL_CALLS)] | None = None
    function_call: CalledFunction | None = None  # deprecated predecessor of tool_calls
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: Any = None

    @model_validator(mode="after")
    def _refuse_audio(self) -> "Message":
        if not is_off(self.audio):
            raise BodyError(
                400, "'audio' of a message is not served here", param="messages", code="unsupported_parameter"
            )
        return self

    def as_turn(self) -> ChatMessage:
        """Returns the chat message for the template."""
        content, thinking = self.content, ""
        if isinstance(content, list) and self.role == "assistant":  # in other roles they are texts, as in vLLM
            thinking = "".join(part.shown for part in content if isinstance(part, ThinkingPart))
            content = [part for part in content if not isinstance(part, ThinkingPart)]
        return ChatMessage(
            role=self.role,
            content=tuple(map(_shown, content)) if isinstance(content, list) else content or "",
            name=self.name or "",
            reasoning=self.reasoning_content or self.reasoning or thinking,
            tool_calls=tuple(self._calls()),
            tool_call_id=self.tool_call_id or "",
        )

    def _calls(self) -> Iterator[ToolCall]:
        for call in self.tool_calls or ():
            yield ToolCall(call.id or "", call.function.name, call.function.arguments_json)
        if self.function_call is not None and not self.tool_calls:
            yield ToolCall("", self.function_call.name, self.function_call.arguments_json)


def _shown(part: Part) -> str:
    return part if isinstance(part, str) else part.shown


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Checks a tool's type, 'function' if it has none, and name; the template gets the rest unchanged."""
    if "type" not in tool:
        tool = {"type": "function", **tool}
    function = tool.get("function")
    if tool["type"] != "function" or not isinstance(function, dict):
        raise ValueError("a tool must have the type 'function' and a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a function must have a name")
    return tool


Tool = Annotated[FreeObject, AfterValidator(_checked_tool)]


class ConversationBody(Body):
    """Parameters of the prompt."""

    entry_kinds = {"messages": Message}  # noqa: RUF012 - a ClassVar of Body's

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, NoneIfEmpty] = None
    chat_template_kwargs: FreeObject | None = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    documents: list[FreeObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    _tool_use: ToolUse = PrivateAttr()

    @model_validator(mode="after")
    def _check_prompt(self) -> "ConversationBody":
        self._tool_use = self._checked_tool_use()
        if self.continue_final_message and self.add_generation_prompt:
            raise BodyError(
                400,
                "continue_final_message and add_generation_prompt do not go together",
                param="continue_final_message",
            )
        return self

    @property
    def calls_one_tool(self) -> bool:
        """Whether tool_choice names the tool to call."""
        return self._tool_use.one_call

    def prompt_of(self, messages: Sequence[Message]) -> Sliced[ChatPrompt]:
        """Returns the conversation for the template."""
        turns = []
        for message in messages:
            turns.append(message.as_turn())
            yield
        return ChatPrompt(
            tuple(turns),
            ChatOptions(
                tools=tuple(self._tool_use.offered),
                template_kwargs=self._template_kwargs(),
                add_generation_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
            ),
        )

    def _template_kwargs(self) -> dict[str, Any]:
        """Returns the template's variables; chat_template_kwargs override others."""
        documents = {"documents": self.documents} if self.documents else {}
        return reasoning_variables(self.reasoning_effort or "") | documents | (self.chat_template_kwargs or {})

    def _checked_tool_use(self) -> ToolUse:
        tools = self.tools or []
        match self.tool_choice:
            case "none":
                return ToolUse()
            case None | "auto":
                return ToolUse(tools)
            case "required":
                return ToolUse(tools, required_tools(tools))
            case {"function": {"name": str(name)}}:  # Hugging Face's client sends no type
                return ToolUse(tools, required_tools(tools, [name]), one_call=True)
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
            }:
                functions = [tool.get("function") for tool in allowed if isinstance(tool, dict)]
                names = [function.get("name") for function in functions if isinstance(function, dict)]
                return allowed_tools(tools, mode, names, one_call=False)
        raise BodyError(
            400,
            "tool_choice must be 'none', 'auto', 'required', an object with the type 'function' and the function's "
            "name, or one with the type 'allowed_tools', a mode and tools",
            param="tool_choice",
        )


class ChatBody(ConversationBody, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: PositiveCount | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @property
    def tool_use(self) -> ToolUse:
        """Tools that may be called, and those that must be."""
        return replace(self._tool_use, one_call=self.calls_one_tool or self.parallel_tool_calls is False)

    @property
    def echoed(self) -> str:
        """Start of the answers, as in vLLM: with `echo`, the last assistant message, which they continue."""
        last = self.messages[-1].as_turn() if self.echo and self.messages else None
        if last is None or last.role != "assistant":
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(last.content)

    @model_validator(mode="after")
    def _take_num_probs(self) -> "ChatBody":
        if self.n_probs and self.logprobs is None:
            self.logprobs, self.top_logprobs = True, self.n_probs
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise BodyError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self


class TokenizeBody(ConversationBody):
    """POST /tokenize: one of prompt and messages."""

    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise BodyError(400, "set exactly one of prompt and messages", param="prompt")
        return self
