"""Structured output parameters: `response_format` of OpenAI and others, and vLLM's `structured_outputs`."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from frontend.api.http.bodies import FreeObject, ParameterObject
from frontend.api.http.errors import BodyError
from frontend.api.http.output_constraint import schema_constraint
from frontend.api.http.unserved_parameters import is_off
from frontend.request.convert_structured import choice_constraint, text_constraint

Schema = str | FreeObject


class JsonSchema(ParameterObject):
    """A schema with a name. It is enforced whether or not `strict` is set."""

    name: str = ""
    description: str | None = None
    schema_: FreeObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ParameterObject):
    """OpenAI's `response_format`, with llama.cpp's `schema` of a json_object and TGI's formats with a `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")
    value: Schema | None = None

    def constraints(self) -> Iterator[OutputConstraint]:
        """Yields the format, if there is one.

        Raises:
            BodyError: the schema or regular expression is missing.
        """
        field = "response_format"
        match self.type:
            case "json_object" | "json":
                if object_schema := self.schema_ or self.value:
                    yield schema_constraint(object_schema, field)
                else:
                    yield OutputConstraint(ConstraintKind.JSON_OBJECT, "", field)
            case "regex":
                if not isinstance(self.value, str):
                    raise BodyError(400, "response_format of type regex needs a value of type string", param=field)
                yield text_constraint(ConstraintKind.REGEX, self.value, field)
            case "json_schema":
                schema = self.json_schema
                if schema is None or schema.schema_ is None:
                    raise BodyError(400, "response_format of type json_schema needs json_schema.schema", param=field)
                yield schema_constraint(schema.schema_, field, strict=bool(schema.strict))


Choices = Annotated[list[str], Field(fail_fast=True)]


class StructuredOutputs(ParameterObject):
    """vLLM's `structured_outputs`: exactly one format."""

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

    def constraint(self) -> OutputConstraint:
        """Returns the format.

        Raises:
            BodyError: there is none, or more than one.
        """
        field = "structured_outputs"
        constraints = []
        if self.json_ is not None:
            constraints.append(schema_constraint(self.json_, field))
        if self.json_object:
            constraints.append(OutputConstraint(ConstraintKind.JSON_OBJECT, "", field))
        if self.regex is not None:
            constraints.append(text_constraint(ConstraintKind.REGEX, self.regex, field))
        if self.choice is not None:
            constraints.append(choice_constraint(self.choice, field))
        if self.grammar is not None:
            constraints.append(text_constraint(ConstraintKind.GRAMMAR, self.grammar, field))
        if len(constraints) != 1:
            keys = "json, json_object, regex, choice and grammar"
            raise BodyError(400, f"{field} needs exactly one of {keys}, not {len(constraints)}", param=field)
        return constraints[0]
