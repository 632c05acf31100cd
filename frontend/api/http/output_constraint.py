"""Structured output over HTTP: turns formats, JSON Schemas and required tool calls into an `OutputConstraint`."""

import json
import re
from collections.abc import Sequence
from typing import Any

from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from frontend.api.http.errors import BodyError
from frontend.api.http.tool_use import ToolUse
from frontend.limits import MAX_CONSTRAINT_BYTES
from frontend.request.checks import check_at_most
from frontend.request.convert_structured import text_constraint
from frontend.text.chat import TOOL_NAME, CallableTool, ChatFormat
from frontend.text.tokenizer import Tokenizer

_TOOL_NAME = re.compile(TOOL_NAME)


def chat_constraint(
    constraint: OutputConstraint | None, tool_use: ToolUse, chat_format: ChatFormat, tokenizer: Tokenizer
) -> OutputConstraint | None:
    """Returns the constraint on a chat answer, tool calls included; None: unconstrained.

    With a text constraint and optional tools, the answer is either text that matches or calls. A required call
    leaves no text, so the text constraint has no effect, as in OpenAI's API.

    Args:
        constraint: on the answer's text; None: unconstrained.
        tool_use: the tools that may and that must be called.
        chat_format: how the model marks calls.
        tokenizer: the model's.

    Raises:
        BodyError: the calls cannot be enforced, or the constraint does not go together with optional tools.
        InvalidRequest: constraint and tools together are too large.
    """
    if tool_use.required:
        constraint = None
    tools = tool_use.required or (tool_use.offered if constraint is not None else ())
    if not tools or chat_format.tools == "none":  # the latter is refused where the prompt is made
        return constraint
    field = "tools" if constraint is None else constraint.field
    callable_tools = [_callable(tool["function"]) for tool in tools]
    num_bytes = sum(len(_json(tool.parameters).encode()) for tool in callable_tools)
    check_at_most(field, num_bytes, MAX_CONSTRAINT_BYTES, "bytes")
    rules = chat_format.call_rules(
        callable_tools,
        tokenizer.special_token_id,
        # A model that is not shown its tools has no reason to end a row of calls.
        one_only=tool_use.one_call or not tokenizer.chat.shows_tools,
    )
    schemas: dict[str, Any] = dict(rules.schemas)
    lark = "start: calls"
    if constraint is not None:
        schemas["answer"] = _schema_beside_tools(constraint)
        lark += " | " + f"{chat_format.answer_start(tokenizer.special_token_id)} @answer".lstrip()
    closed = list(rules.schemas)
    if constraint is not None and constraint.kind is ConstraintKind.STRICT_JSON_SCHEMA:
        closed.append("answer")
    parts = {
        "lark": f"{lark}\n{rules.lark}",
        "schemas": schemas,
        "closed": closed,
        "places": {name: _place(tools[index], tool_use.offered) for name, index in rules.places.items()},
    }
    text = _json(parts)
    check_at_most(field, len(text.encode()), MAX_CONSTRAINT_BYTES, "bytes")
    return OutputConstraint(ConstraintKind.PARTS, text, field)


def schema_constraint(schema: str | dict[str, Any], field: str, *, strict: bool = False) -> OutputConstraint:
    """Returns the constraint for a JSON Schema.

    Args:
        field: the parameter that errors name.
        strict: close objects: they have only the members that the schema names, unless it says otherwise.

    Raises:
        InvalidRequest: it is empty or too large.
    """
    text = schema if isinstance(schema, str) else _json(schema)
    return text_constraint(ConstraintKind.STRICT_JSON_SCHEMA if strict else ConstraintKind.JSON_SCHEMA, text, field)


def _json(value: Any) -> str:
    r"""Returns the shortest JSON; half a surrogate pair, which UTF-8 cannot encode, stays \uXXXX."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace").decode()


def _schema_beside_tools(constraint: OutputConstraint) -> Any:
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return {"type": "object"}
    if constraint.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.STRICT_JSON_SCHEMA):
        try:
            return json.loads(constraint.text)
        except (ValueError, RecursionError):
            raise BodyError(400, f"{constraint.field} is not valid JSON", param=constraint.field) from None
    raise BodyError(400, f"{constraint.field} and tools go together only with JSON output", param=constraint.field)


def _place(tool: dict[str, Any], offered: Sequence[dict[str, Any]]) -> str:
    """Returns a tool's name in error messages."""
    index = next(index for index, other in enumerate(offered) if other is tool)
    return f"tools[{index}].function {tool['function']['name']!r}"


def _callable(function: dict[str, Any]) -> CallableTool:
    name, parameters = function["name"], function.get("parameters") or {}
    if not _TOOL_NAME.fullmatch(name):
        raise BodyError(
            400,
            f"a call of {name[:64]!r} cannot be enforced: the name must be 1 to 128 letters, digits, '_', '-' or '.'",
            param="tools",
        )
    if not isinstance(parameters, dict):
        raise BodyError(400, f"the parameters of {name!r} must be a JSON object", param="tools")
    return CallableTool(name, parameters)
