"""Requests of the Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from chairlift.service.sampling_fields import STOPPING
from chairlift.service.structured.output_constraint import OutputConstraint
from frontend.api.anthropic.input_messages import Content, Message, turns
from frontend.api.anthropic.tools import tool_use
from frontend.api.http.bodies import Body, FreeObject, ParameterObject, PositiveCount, SamplingBody
from frontend.api.http.errors import BodyError
from frontend.api.http.output_constraint import schema_constraint
from frontend.api.http.tool_use import ToolUse
from frontend.api.http.unserved_parameters import is_off
from frontend.limits import MAX_MESSAGES, MAX_TOOLS
from frontend.request.request import ChatPrompt
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatOptions, thinking_variables

_MAX_STOP_TEXTS = STOPPING["stop_texts"].rule.max_entries


class Thinking(ParameterObject):
    """Whether the model reasons before it answers. budget_tokens is accepted and has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(ParameterObject):
    """Structured-output format."""

    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(ParameterObject):
    """Reasoning effort and structured-output format."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """Parameters of the prompt; the body of POST /v1/messages/count_tokens."""

    entry_kinds = {"messages": Message}  # noqa: RUF012 - a ClassVar of Body's

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[FreeObject], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: FreeObject | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: FreeObject | None = None

    mcp_servers: Any = None
    container: Any = None

    _tool_use: ToolUse = PrivateAttr()

    @model_validator(mode="after")
    def _check_conversation(self) -> "PromptBody":
        for name in ("mcp_servers", "container"):
            if not is_off(getattr(self, name)):
                raise BodyError(400, f"{name} is not served: only tools that the client runs are")
        self._tool_use = tool_use(self.tools or (), self.tool_choice)
        return self

    def chat(self) -> Sliced[ChatPrompt]:
        """Returns the conversation, in slices. The model continues a final assistant message.

        Raises:
            BodyError: a block that is not served.
        """
        messages = yield from turns(self.system, self.messages)
        continues = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
        options = ChatOptions(
            tools=tuple(self._tool_use.offered),
            template_kwargs=self._template_variables(),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        return ChatPrompt(messages, options)

    @property
    def tool_use(self) -> ToolUse:
        """Tools that may be called, and those that must be."""
        return self._tool_use

    def _template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables |= thinking_variables(thinks=self.thinking.type != "disabled")
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return variables | (self.chat_template_kwargs or {})


class MessagesBody(PromptBody, SamplingBody):
    """POST /v1/messages."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[str], Field(fail_fast=True, max_length=_MAX_STOP_TEXTS)] | None = None
    output_format: OutputFormat | None = None

    thread: Any = None
    compaction: Any = None

    @model_validator(mode="after")
    def _refuse_server_side_conversations(self) -> "MessagesBody":
        if not is_off(self.thread):
            text = "thread is not served: this server stores no conversations; send the whole conversation in messages"
            raise BodyError(400, text, code="thread_unsupported_request")  # clients then send it, without a thread
        if not is_off(self.compaction):
            raise BodyError(400, "compaction is not served: this server does not summarize conversations")
        return self

    @property
    def stop_texts(self) -> list[str]:
        """Strings that end the answer."""
        return self.stop_sequences or []

    @property
    def shows_thinking(self) -> bool:
        """Whether thinking is returned as text, not only as a signature."""
        return self.thinking is None or self.thinking.display != "omitted"

    def output_constraint(self) -> OutputConstraint | None:
        """Returns the constraint on the answer; None: free text.

        Raises:
            InvalidRequest: the schema is too large.
        """
        in_config = self.output_config.format if self.output_config is not None else None
        text_format = in_config or self.output_format
        if text_format is None:
            return None
        return schema_constraint(text_format.schema_, "output_config.format" if in_config else "output_format")
