"""What bodies say of the form of an answer, as forms: a response format, vLLM's parameters, calls that must be made."""

import json
import re
from collections.abc import Sequence
from typing import Any

from frontend.api.http.errors import BodyError
from frontend.api.http.tool_use import ToolUse
from frontend.limits import MAX_FORM_BYTES
from frontend.request.checks import check_at_most
from frontend.request.convert_structured import text_form
from frontend.text.chat import CallableTool, ChatFormat
from frontend.text.structured.output_format import FormKind, OutputForm
from frontend.text.tokenizer import Tokenizer

_TOOL_NAME = re.compile(r"[\w.\-]{1,64}")


def chat_form(
    form: OutputForm | None, tool_use: ToolUse, chat_format: ChatFormat, tokenizer: Tokenizer
) -> OutputForm | None:
    """The form of a conversation's answer, calls included; None: any.

    Of a form and tools that may be called the answer has one; calls that must be made leave no room for a form.

    Args:
        form: of its text; None: any.
        tool_use: which tools may be called, and which must.
        chat_format: how the model marks calls.
        tokenizer: the model's.

    Raises:
        BodyError: calls that cannot be enforced, or not beside the form.
        InvalidRequest: the form is too large together with the tools.
    """
    must_call = tool_use.required
    tools = must_call or (tool_use.offered if form is not None else ())
    if not tools or chat_format.tools == "none":  # the latter is refused where the prompt is made
        return form
    field = "tools" if form is None else form.field
    if must_call and form is not None:
        raise BodyError(400, f"{field} leaves no room for the call that tool_choice asks for", param=field)
    rules = chat_format.call_rules(
        [_callable(tool["function"]) for tool in tools],
        tokenizer.special_token_id,
        # A model that is not shown its tools has no reason to end a row of calls.
        one_only=tool_use.one_call or not tokenizer.chat.shows_tools,
    )
    schemas: dict[str, Any] = dict(rules.schemas)
    lark = "start: calls"
    if form is not None:
        schemas["answer"] = _schema_beside_tools(form)
        lark += " | " + f"{chat_format.answer_start(tokenizer.special_token_id)} @answer".lstrip()
    closed = list(rules.schemas)
    if form is not None and form.kind is FormKind.STRICT_JSON_SCHEMA:
        closed.append("answer")
    parts = {
        "lark": f"{lark}\n{rules.lark}",
        "schemas": schemas,
        "closed": closed,
        "places": {name: _place(tools[index], tool_use.offered) for name, index in rules.places.items()},
    }
    text = json.dumps(parts)
    check_at_most(field, len(text), MAX_FORM_BYTES, "bytes")
    return OutputForm(FormKind.PARTS, text, field)


def schema_form(schema: str | dict[str, Any], field: str, *, strict: bool = False) -> OutputForm:
    """The form of a JSON Schema.

    Args:
        field: the parameter that an error names.
        strict: objects have no members but those that the schema names, unless it says otherwise.

    Raises:
        InvalidRequest: it is empty or too large.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return text_form(FormKind.STRICT_JSON_SCHEMA if strict else FormKind.JSON_SCHEMA, text, field)


def _schema_beside_tools(form: OutputForm) -> Any:
    if form.kind is FormKind.JSON_OBJECT:
        return {"type": "object"}
    if form.kind in (FormKind.JSON_SCHEMA, FormKind.STRICT_JSON_SCHEMA):
        try:
            return json.loads(form.text)
        except (ValueError, RecursionError):
            raise BodyError(400, f"{form.field} is not valid JSON", param=form.field) from None
    raise BodyError(400, f"{form.field} and tools go together only if the form is one of JSON", param=form.field)


def _place(tool: dict[str, Any], offered: Sequence[dict[str, Any]]) -> str:
    """What errors call a tool."""
    index = next(index for index, other in enumerate(offered) if other is tool)
    return f"tools[{index}].function {tool['function']['name']!r}"


def _callable(function: dict[str, Any]) -> CallableTool:
    name, parameters = function["name"], function.get("parameters") or {}
    if not _TOOL_NAME.fullmatch(name):
        raise BodyError(
            400,
            f"a call of {name[:64]!r} cannot be enforced: the name must be 1 to 64 letters, digits, '_', '-' or '.'",
            param="tools",
        )
    if not isinstance(parameters, dict):
        raise BodyError(400, f"the parameters of {name!r} must be a JSON object", param="tools")
    return CallableTool(name, parameters)
