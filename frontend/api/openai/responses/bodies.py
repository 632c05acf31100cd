"""Requests of the Responses API."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from frontend.api.http.bodies import Body, Count, FreeObject, ParameterObject, PositiveCount, Texts
from frontend.api.http.errors import BodyError
from frontend.api.http.output_constraint import schema_constraint
from frontend.api.http.tool_use import ToolUse
from frontend.api.http.unserved_parameters import is_off
from frontend.api.openai.responses.input_items import Item, turns
from frontend.api.openai.responses.tools import ignored_type, tool_use
from frontend.api.openai.sampling_body import OpenAISamplingBody
from frontend.limits import MAX_MESSAGES, MAX_TOOLS
from frontend.request.request import ChatPrompt
from frontend.slices import Sliced
from frontend.text.chat.messages import ChatOptions, reasoning_variables

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        _ENCRYPTED,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include`. Most concern hosted tools, which are not served."""

Objects = Annotated[list[FreeObject], Field(fail_fast=True, max_length=MAX_TOOLS)]


class TextFormat(ParameterObject):
    """Structured-output format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ParameterObject):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(ParameterObject):
    """Reasoning effort, and whether reasoning is returned as a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ConversationBody(Body):
    """Parameters of the prompt; the body of POST /v1/responses/input_tokens."""

    entry_kinds = {"input": Item}  # noqa: RUF012 - a ClassVar of Body's

    input: str | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: str | FreeObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: FreeObject | None = None

    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    truncation: str | None = None

    _tool_use: ToolUse = PrivateAttr()

    @model_validator(mode="after")
    def _check_conversation(self) -> "ConversationBody":
        for name in ("previous_response_id", "conversation", "prompt"):
            if not is_off(getattr(self, name)):
                raise BodyError(
                    400,
                    f"{name} is not served: this server stores no responses, conversations or prompts; send the whole "
                    "conversation in input",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.truncation not in (None, "disabled"):
            raise BodyError(
                400,
                "truncation must be 'disabled': a conversation that does not fit the model's context is refused",
                param="truncation",
                code="unsupported_value",
            )
        one_call = self.parallel_tool_calls is False
        self._tool_use = tool_use(self.tools or (), self.tool_choice, one_call=one_call)
        return self

    def chat(self) -> Sliced[ChatPrompt]:
        """Returns the conversation, in slices.

        Raises:
            BodyError: an item that is not served.
        """
        options = ChatOptions(tools=tuple(self._tool_use.offered), template_kwargs=self._template_variables())
        return ChatPrompt((yield from turns(self.instructions, self.input)), options)

    @property
    def tool_use(self) -> ToolUse:
        """Tools that may be called, and those that must be."""
        return self._tool_use

    def unknown_parameters(self) -> Iterator[str]:
        """See Body. Tools that the model is not offered count too, by their types."""
        yield from super().unknown_parameters()
        yield from dict.fromkeys(f"tools.{kind}" for tool in self.tools or () if (kind := ignored_type(tool)))

    def _template_variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return reasoning_variables(effort or "") | (self.chat_template_kwargs or {})


class ResponsesBody(ConversationBody, OpenAISamplingBody):
    """POST /v1/responses."""

    max_output_tokens: PositiveCount | None = None
    top_logprobs: Count | None = None
    include: Texts | None = None
    metadata: FreeObject | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: FreeObject | None = None
    max_tool_calls: int | None = None

    @model_validator(mode="after")
    def _check_options(self) -> "ResponsesBody":
        if self.background:
            raise BodyError(
                400,
                "background is not served: this server stores no responses to be fetched later",
                param="background",
                code="unsupported_parameter",
            )
        for value in self.include or ():
            if value not in _INCLUDABLE:
                raise BodyError(400, f"include has no value {value[:64]!r}", param="include")
        return self

    @property
    def logprobs(self) -> int | None:
        """Alternatives per token of the text; None: no log-probabilities."""
        if _LOGPROBS in (self.include or ()) or self.top_logprobs:
            return self.top_logprobs or 0
        return None

    @property
    def with_summary(self) -> bool:
        """Whether reasoning is returned as a summary."""
        options = self.reasoning
        return options is not None and (options.summary or options.generate_summary) is not None

    @property
    def with_encrypted_reasoning(self) -> bool:
        """Whether reasoning is returned as an opaque string."""
        return _ENCRYPTED in (self.include or ())

    def output_constraint(self) -> OutputConstraint | None:
        """Returns the constraint on the answer; None: free text.

        Raises:
            BodyError: the JSON Schema is missing.
            InvalidRequest: the schema is too large.
        """
        text_format = self.text.format if self.text is not None else None
        field = "text.format"
        match text_format.type if text_format is not None else "text":
            case "json_object":
                return OutputConstraint(ConstraintKind.JSON_OBJECT, "", field)
            case "json_schema":
                assert text_format is not None
                if text_format.schema_ is None:
                    raise BodyError(400, "text.format of type json_schema needs a schema", param=field)
                return schema_constraint(text_format.schema_, field, strict=bool(text_format.strict))
        return None
