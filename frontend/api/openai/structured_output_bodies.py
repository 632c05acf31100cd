"""Parameters that say what form an answer must have: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from frontend.api.http.body_models import Nested
from frontend.api.http.errors import BodyError
from frontend.api.http.unserved_parameters import is_off


class JsonSchema(Nested):
    """A schema with a name. It is held to whether or not `strict` is set."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Nested):
    """OpenAI's word for the form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Schema = str | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True)]


class StructuredOutputs(Nested):
    """vLLM's word for it: exactly one."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    structural_tag: Any = None

    @field_validator("structural_tag")
    @classmethod
    def _refuse_structural_tag(cls, value: Any) -> Any:
        if not is_off(value):
            raise BodyError(
                400,
                "'structural_tag' of structured_outputs is not served here",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        return value
