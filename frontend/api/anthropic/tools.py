"""Tools and `tool_choice` of the Messages API, converted to those of Chat Completions."""

from collections.abc import Sequence
from typing import Any

from frontend.api.http.errors import BodyError
from frontend.api.http.tool_use import ToolUse, function_tool, required_tools


def tool_use(tools: Sequence[dict[str, Any]], choice: dict[str, Any] | None) -> ToolUse:
    """Returns the tools that may be called, and those that must be.

    Raises:
        BodyError: a tool or choice that is not served or malformed.
    """
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    one_call = bool(choice and choice.get("disable_parallel_tool_use"))
    match choice:
        case None | {"type": "auto"}:
            return ToolUse(functions, one_call=one_call)
        case {"type": "none"}:
            return ToolUse()
        case {"type": "any"}:
            return ToolUse(functions, required_tools(functions), one_call=one_call)
        case {"type": "tool", "name": str(name)}:
            return ToolUse(functions, required_tools(functions, [name]), one_call=True)
    raise BodyError(400, "tool_choice must have the type auto, any, none, or tool with a name")


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise BodyError(
            400,
            f"{where} has the type {str(kind)[:64]!r}: only tools with an input_schema, run by the client, are served",
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise BodyError(400, f"{where} needs an input_schema, which is a JSON object")
    return function_tool(
        where,
        name=tool.get("name"),
        description=tool.get("description"),
        parameters=tool["input_schema"],
        strict=tool.get("strict"),
    )
