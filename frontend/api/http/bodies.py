"""Models of request bodies: names and types of the parameters that all HTTP APIs share.

`frontend.request.convert` checks the values, for all APIs. Numbers and booleans are read in pydantic's lax mode (`5.0`
and `"5"` for 5), as clients in other languages write them. `unserved_parameters` lists parameters that are refused or
ignored by name, `UnknownParameters` is the policy for all others.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from chairlift.service import sampling_fields as fields
from frontend.api.http.errors import BodyError
from frontend.api.http.unserved_parameters import UNSERVED, WITHOUT_EFFECT, is_neutral, is_off
from frontend.limits import MAX_JSON_DEPTH

UINT32_MAX = 2**32 - 1

_encode_finite = json.JSONEncoder(allow_nan=False).encode
_NOT_FINITE = "not_finite"

TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]


def _array_as_it_is(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Token ids of a large body are an array that `read_json` has checked."""
    return value if isinstance(value, array) else check(value)


TokenIds = Annotated[
    list[TokenId],
    Field(fail_fast=True),  # one error instead of 100,000
    WrapValidator(_array_as_it_is),
]
StrictTokenIds = Annotated[
    list[Annotated[TokenId, Strict()]],  # so that "5" is a text of a list
    Field(fail_fast=True),
    WrapValidator(_array_as_it_is),
]
Texts = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=UINT32_MAX)]
PositiveCount = Annotated[int, Field(ge=1, le=UINT32_MAX)]


def _finite(value: Any) -> Any:
    """Refuses numbers that no JSON can hold: parsers read 1e999 and NaN as floats."""
    try:
        _encode_finite(value)
    except ValueError:
        raise PydanticCustomError(_NOT_FINITE, "a number is not finite") from None
    return value


FreeObject = Annotated[dict[str, Any], AfterValidator(_finite)]
"""An object of any members, which is passed on or sent back as JSON."""


def _bias_by_token(value: Any) -> Any:
    """Converts string keys to ints; some languages write an empty object as a list."""
    if isinstance(value, dict):
        try:
            return {int(key): bias for key, bias in value.items()}
        except ValueError:
            raise ValueError("the keys of logit_bias must be token ids") from None
    return {} if value == [] else value


def _none_if_empty(value: Any) -> Any:
    return None if value in ("", {}, []) else value


NoneIfEmpty = BeforeValidator(_none_if_empty)
"""Reads an empty text, object or list as null."""


class ParameterObject(BaseModel):
    """An object of parameters inside a body; its unknown names count as unknown parameters."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_finite)]]


class ConversationObject(BaseModel):
    """An object of a conversation, which clients send back as they received it. Unknown members are ignored because
    clients and gateways add their own.
    """

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class Body(BaseModel):
    """Base of all bodies.

    Attributes:
        id_lists: parameters that are lists of token ids, or lists of such lists; long ones are arrays.
        entry_kinds: models of the entries of long lists; those of a large body are checked one by one.
    """

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    id_lists: ClassVar[frozenset[str]] = frozenset({"prompt", "tokens", "allowed_token_ids"})
    entry_kinds: ClassVar[Mapping[str, type[BaseModel]]] = {}

    model: Annotated[str, BeforeValidator(lambda name: "" if name is None else name)] = ""

    @model_validator(mode="after")
    def _refuse_unserved(self) -> "Body":
        for name, value in (self.model_extra or {}).items():
            if name in UNSERVED and not is_neutral(name, value):
                text = f"the parameter {name!r} is not served here"
                raise BodyError(400, text, param=name, code="unsupported_parameter")
        return self

    @property
    def service_class(self) -> str:
        """Name of the service class that it asks for; empty: the server's choice."""
        return ""

    def unknown_parameters(self) -> Iterator[str]:
        """Yields the names of unknown parameters that are set."""
        return (name for name in unknown_names(self) if name not in WITHOUT_EFFECT and name not in UNSERVED)


_HTTP_KINDS: Mapping[Any, Any] = {
    float: float,
    int: Count,
    bool: bool,
    fields.TokenIds: TokenIds,
    fields.Texts: Texts,
    fields.Biases: Annotated[dict[TokenId, float], BeforeValidator(_bias_by_token)],
}
_OTHER_RANGES: Mapping[str, Any] = {
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64)],  # taken modulo 2^64
    "top_k": Annotated[int, Field(ge=-1, le=2**31 - 1)],  # -1 is vLLM's word for all
}
_NAMED_BY_ENDPOINT = ("max_tokens", "stop_texts")
SHARED_PARAMETERS = {
    name: row for name, row in {**fields.SAMPLING, **fields.STOPPING}.items() if name not in _NAMED_BY_ENDPOINT
}
"""Sampling and stopping parameters that have one name in the bodies of all endpoints."""


def _body_field(row: fields.Parameter) -> tuple[Any, Any]:
    kind = _OTHER_RANGES.get(row.name, _HTTP_KINDS[row.kind])
    schema: dict[str, Any] = {}
    if row.kind is float:  # checked with the field's name by `frontend.request`, and described here
        schema = {"exclusiveMinimum" if row.rule.above_minimum else "minimum": row.rule.minimum}
        schema["maximum"] = row.rule.maximum
    return kind | None, Field(None, description=f"{row.rule.doc}. {row.limits}", json_schema_extra=schema)


_body_fields: dict[str, Any] = {row.http_name: _body_field(row) for row in SHARED_PARAMETERS.values()}
_SharedParameters: Any = create_model("_SharedParameters", **_body_fields)


class SamplingBody(Body, _SharedParameters):  # type: ignore[misc]  # made from the shared table
    """Parameters of every kind of generation, beside those of the shared table: vLLM's, and `timeout`."""

    stream: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None

    @property
    def stop_texts(self) -> list[str]:
        """Strings that end the answer."""
        return []


def unknown_names(model: BaseModel) -> Iterator[str]:
    """Yields the names of undeclared members that are set; those of nested objects with their path, as in
    "stream_options.x".
    """
    for name, value in (model.model_extra or {}).items():
        if not is_off(value):
            yield name
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, ParameterObject):
            yield from (f"{field.alias or name}.{inner}" for inner in unknown_names(value))


_PROMPT_FORMS = "must be a string, a list of strings, a list of token ids or a list of lists of token ids"


def body_error(error: ValidationError) -> BodyError:
    """Converts the first error of pydantic's list."""
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        if "recursion limit" in first["msg"]:  # pydantic's own, which is somewhat above ours
            return BodyError(400, f"the body's JSON is nested more than {MAX_JSON_DEPTH} levels deep")
        return BodyError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if beside := [error for error in errors if error["type"] == _NOT_FINITE]:  # it may be one form of a union
        param = str(beside[0]["loc"][0])
        return BodyError(400, f"{param} has a number that is not finite, such as 1e999 or NaN", param=param)
    path = [str(part) for part in first["loc"]]
    if not path:
        return BodyError(400, "the body must be a JSON object")
    if path[0] == "prompt" and len(path) > 1:  # a union: pydantic complains once for each of its forms
        return BodyError(400, f"prompt {_PROMPT_FORMS}", param="prompt")
    if path[1:] == ["str"] and len(errors) > 1:  # a text or a list: what is wrong with the list says more
        first = errors[1]
        path = [path[0], *(str(part) for part in first["loc"][2:])]
        if first["type"] == "list_type":
            return BodyError(400, f"{path[0]} must be a string or a list of objects", param=path[0])
    if "content" in path:
        where = ".".join(path[: path.index("content") + 1])
        tags = [str(error["ctx"]["tag"]) for error in errors if "tag" in error.get("ctx", {})]  # types of parts
        message = f"{where} must be a string or a list of parts of type text"
        if not tags:
            return BodyError(400, message, param=path[0])
        message += f", not {tags[0][:64]!r}: images, audio and files are not supported"
        return BodyError(400, message, param=path[0], code="unsupported_value")
    return BodyError(400, f"{'.'.join(path)}: {first['msg']}", param=path[0])
