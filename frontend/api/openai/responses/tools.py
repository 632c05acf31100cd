"""Tools and `tool_choice` of the Responses API, converted to those of Chat Completions."""

from collections.abc import Sequence
from typing import Any

from frontend.api.http.errors import BodyError
from frontend.api.http.tool_use import ToolUse, allowed_tools, function_tool, required_tools


def ignored_type(tool: dict[str, Any]) -> str:
    """Returns the type of a tool that the model is not offered; empty: it is offered. Only functions are; clients such
    as Codex send tools of other types with every request.
    """
    kind = tool.get("type")
    return kind if isinstance(kind, str) and kind != "function" else ""


def tool_use(tools: Sequence[dict[str, Any]], choice: str | dict[str, Any] | None, *, one_call: bool) -> ToolUse:
    """Returns the tools that may be called, and those that must be.

    Raises:
        BodyError: a tool or choice that is not served or malformed.
    """
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools) if not ignored_type(tool)]
    match choice:
        case "none":
            return ToolUse()
        case None | "auto":
            return ToolUse(functions, one_call=one_call)
        case "required":
            return ToolUse(functions, required_tools(functions), one_call=one_call)
        case {"type": "function", "name": str(name)}:
            return ToolUse(functions, required_tools(functions, [name]), one_call=True)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = [tool.get("name") for tool in allowed if isinstance(tool, dict) and tool.get("type") == "function"]
            return allowed_tools(functions, mode, names, one_call=one_call)
    raise BodyError(
        400,
        "tool_choice must be 'none', 'auto', 'required', {type: 'function', name} or {type: 'allowed_tools', mode, "
        "tools}",
        param="tool_choice",
    )


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BodyError(400, f"{where} needs a type", param="tools")
    return function_tool(
        where,
        name=tool.get("name"),
        description=tool.get("description"),
        parameters=tool.get("parameters"),
        strict=tool.get("strict"),
    )
