"""Parameters that say what form an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from frontend.openai.nested import Nested


class JsonSchema(Nested):
    """A schema with a name. It is held to whether or not `strict` is set."""

    where = "response_format"

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Nested):
    """OpenAI's word for the form."""

    where = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True)]


class StructuredOutputs(Nested):
    """vLLM's word for it: exactly one."""

    where = "structured_outputs"

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
