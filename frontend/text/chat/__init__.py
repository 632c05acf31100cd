"""What a chat door needs beside the template: the parts of an answer (reasoning, tool calls, content) told apart while
it arrives.

    chat_format(template_text)        once per model: which marks its template teaches it
        .parser(tools=...)            once per answer: an `AnswerParser`
            .feed(text) -> deltas     for each piece of the answer's text
            .finish() -> deltas       at its end

Pure: text in, deltas out. Knows no tokens, no protos, no HTTP.
"""

from frontend.text.chat.call_family import CallableTool, CallRules
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText, ToolCallArguments, ToolCallStart
from frontend.text.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat, chat_format
from frontend.text.chat.parser import AnswerParser

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerParser",
    "CallRules",
    "CallableTool",
    "ChatFormat",
    "ContentText",
    "Delta",
    "ReasoningText",
    "ToolCallArguments",
    "ToolCallStart",
    "chat_format",
]
