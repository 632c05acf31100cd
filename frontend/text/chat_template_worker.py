"""The process that renders chat templates; see `isolated/worker.py`.

-> {"plain": ..., "for_tools": ..., "variables": {...}, "default_kwargs": {...}}
                                                <- {}, after both templates are compiled
-> {"messages": [...], "options": {...}}        <- {"prompt": ...}, repeatedly
"""

from typing import Any

from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.text.chat_template import ChatTemplate, ChatTemplateError
from frontend.text.isolated.worker import CannotStart, Frame, Handler, serve


def renderer(hello: Frame) -> Handler:
    """Returns the function that renders one model's conversations.

    Raises:
        CannotStart: a template cannot be compiled.
    """
    plain, for_tools = hello["plain"], hello["for_tools"]
    try:
        templates = {
            source: ChatTemplate(source, hello["variables"], hello["default_kwargs"])
            for source in {plain, for_tools}
            if source is not None
        }
    except ChatTemplateError as error:
        raise CannotStart(str(error)) from error

    def render(job: Frame) -> Frame:
        options = ChatOptions(**job["options"])
        template = templates[for_tools if options.tools else plain]
        try:
            return {"prompt": template.render([_message(**values) for values in job["messages"]], options)}
        except ChatTemplateError as error:
            return {"error": str(error)}

    return render


def _message(
    role: str, content: str | list[str], tool_calls: list[list[str]] | None = None, **rest: Any
) -> ChatMessage:
    return ChatMessage(
        role=role,
        content=content if isinstance(content, str) else tuple(content),
        tool_calls=tuple(ToolCall(*call) for call in tool_calls or ()),
        **rest,
    )


if __name__ == "__main__":
    serve(renderer)
