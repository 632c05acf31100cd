"""Tools that an answer may or must call, for all HTTP APIs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.api.http.errors import BodyError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one conversation, each in the format of Chat Completions.

    Attributes:
        offered: shown to the model.
        required: one of these must be called; empty: a call is optional.
        one_call: at most one call per answer.
    """

    offered: Sequence[dict[str, Any]] = ()
    required: Sequence[dict[str, Any]] = ()
    one_call: bool = False


def function_tool(where: str, *, name: Any, description: Any, parameters: Any, strict: Any) -> dict[str, Any]:
    """Makes a tool in the format of Chat Completions, which chat templates use.

    Args:
        where: names the tool in an error.
        name, description, parameters, strict: as the client sent them; None: left out.

    Raises:
        BodyError: one of them has the wrong type.
    """
    if not isinstance(name, str) or not name:
        raise BodyError(400, f"{where} has no name", param="tools")
    function: dict[str, Any] = {"name": name}
    for key, value, kind in (
        ("description", description, str),
        ("parameters", parameters, dict),
        ("strict", strict, bool),
    ):
        if value is None:
            continue
        if not isinstance(value, kind):
            raise BodyError(400, f"{where} ({name[:64]!r}): {key} has the wrong type", param="tools")
        function[key] = value
    return {"type": "function", "function": function}


def required_tools(tools: Sequence[dict[str, Any]], names: Collection[object] | None = None) -> list[dict[str, Any]]:
    """Returns the tools of which one must be called.

    Args:
        tools: all of the request.
        names: their names; None: all tools.

    Raises:
        BodyError: there are no tools, or no tool has this name.
    """
    known = [tool["function"]["name"] for tool in tools]
    for name in names or ():
        if name not in known:
            raise BodyError(400, f"tool_choice names {str(name)[:64]!r}, which is not in tools", param="tool_choice")
    found = [tool for tool in tools if names is None or tool["function"]["name"] in names]
    if not found:
        raise BodyError(400, "tool_choice requires a call, and there are no tools", param="tool_choice")
    return found


def allowed_tools(tools: Sequence[dict[str, Any]], mode: str, names: Collection[object], *, one_call: bool) -> ToolUse:
    """Returns the use of OpenAI's `allowed_tools`: the model is shown only these.

    Args:
        tools: all of the request.
        mode: "required": one must be called; "auto": a call is optional.
        names: of the tools that are allowed.
        one_call: at most one call per answer.

    Raises:
        BodyError: there are no names, or no tool has this name.
    """
    found = required_tools(tools, names)
    return ToolUse(found, found if mode == "required" else (), one_call=one_call)
