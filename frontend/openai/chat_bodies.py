"""Bodies with a conversation in them: messages, tools, and what goes with them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from frontend.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.openai.bodies import Body, Count, GenerationBody
from frontend.openai.error_object import BodyError
from frontend.request import ChatPrompt

MAX_TOOLS = 128
_UINT32_MAX = 2**32 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class TextPart(_Strict):
    """A part of a message's content; there are no others here."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """What the assistant called; the arguments are a JSON object as text."""

    name: str
    arguments: str = ""


class Call(_Strict):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in messages put together from a stream


class Message(BaseModel):
    """A turn of a conversation. What answers carry beside this, and has no value, is taken when it comes back."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _refuse_unknown(self) -> "Message":
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                complaint = f"{name[:64]!r} of a message is not served here"
                raise BodyError(400, complaint, param="messages", code="unsupported_parameter")
        return self

    def as_turn(self) -> ChatMessage:
        """The message as templates are given it."""
        content = self.content
        return ChatMessage(
            role=self.role,
            content=tuple(part.text for part in content) if isinstance(content, list) else content or "",
            name=self.name or "",
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
        )


Messages = Annotated[list[Message], Field(fail_fast=True)]


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool goes to the template as it came, with everything that is said of it; all we need is its name."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError("a tool must have the type 'function' and a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a function must have a name")
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_checked_tool)]


class Conversation(Body):
    """Parameters that make the prompt."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "Conversation":
        if self.tool_choice not in (None, "auto", "none"):
            raise BodyError(
                400,
                "tool_choice must be 'auto' or 'none': calls cannot be enforced here",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise BodyError(
                400,
                "continue_final_message and add_generation_prompt do not go together",
                param="continue_final_message",
            )
        return self

    @property
    def tool_names(self) -> frozenset[str]:
        """The tools that are offered to the model."""
        return frozenset(tool["function"]["name"] for tool in self._offered)

    def prompt_of(self, messages: list[Message]) -> ChatPrompt:
        """A conversation as templates are given it."""
        return ChatPrompt(
            tuple(message.as_turn() for message in messages),
            ChatOptions(
                tools=tuple(self._offered),
                template_kwargs=self.chat_template_kwargs or {},
                add_generation_prompt=not self.continue_final_message and self.add_generation_prompt is not False,
                continue_final_message=bool(self.continue_final_message),
            ),
        )

    @property
    def _offered(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else self.tools or []


class ChatBody(Conversation, GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_UINT32_MAX)] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise BodyError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self


class TokenizeBody(Conversation):
    """POST /tokenize: one of prompt and messages."""

    messages: Messages | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise BodyError(400, "set exactly one of prompt and messages", param="prompt")
        return self
