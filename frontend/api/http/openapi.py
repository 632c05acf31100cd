"""Generates the OpenAPI 3.1 document from the endpoints and the models of their bodies."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from frontend import __version__
from frontend.api.http.endpoint import Endpoint

_Input = tuple[type[BaseModel], Literal["validation"]]

_SCHEMAS = "#/components/schemas/"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_TEXT = {"type": "string"}
_ERROR_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "description": "Error in OpenAI's format.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _ERROR_TEXT, "code": _ERROR_TEXT},
        }
    },
}
_ANTHROPIC_ERROR = {
    "description": "Error in Anthropic's format.",
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": _TEXT,
                "message": _TEXT,
                "details": {"type": "object", "properties": {"error_code": _TEXT}},
            },
        },
        "request_id": _TEXT,
    },
}
_ERRORS = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}


def openapi_document(endpoints: Sequence[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """Returns the document.

    Args:
        endpoints: all that are served.
        needs_key: whether endpoints that are not open need an API key.
    """
    bodies: list[_Input] = [(each.body, "validation") for each in endpoints if each.body is not None]
    schemas, definitions = models_json_schema(bodies, ref_template=_SCHEMAS + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        if endpoint.is_described:
            operation = _operation(endpoint)
            if endpoint.body is not None:
                content = {"application/json": {"schema": schemas[endpoint.body, "validation"]}}
                operation["requestBody"] = {"required": True, "content": content}
            if needs_key and not endpoint.is_open:
                operation["security"] = [{"key": []}]
            paths.setdefault(_PARAMETER.sub(r"{\1}", endpoint.path), {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**definitions.get("$defs", {}), **_ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content = {kind: {"schema": _TEXT if kind.startswith("text/") else {"type": "object"}} for kind in endpoint.answers}
    reference = {"$ref": _SCHEMAS + endpoint.error}
    error = {"description": "An error.", "content": {"application/json": {"schema": reference}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {"200": {"description": "Done.", **({"content": content} if content else {})}, "default": error},
    }
    names = _PARAMETER.findall(endpoint.path)
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    return operation
