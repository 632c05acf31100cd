"""Parses chat answers: separates reasoning, tool calls and content while the answer arrives.

    chat_format(template_text)        once per model: detects the marks in its template
        .parser(tools=...)            once per answer: an `AnswerParser`
            .feed(text) -> deltas     for each piece of the answer's text
            .finish() -> deltas       at its end

Pure: text in, deltas out. Knows no tokens, no protos, no HTTP.
"""

from frontend.text.chat.call_family import TOOL_NAME, CallableTool, CallRules
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText, ToolCallArguments, ToolCallStart
from frontend.text.chat.formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormat, chat_format
from frontend.text.chat.parser import AnswerParser

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "TOOL_NAME",
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
