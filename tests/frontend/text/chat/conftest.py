"""Fixture that parses answers."""

import pytest

from frontend.text.chat import ContentText, ReasoningText, ToolCallArguments, ToolCallStart, chat_format


class Parse:
    """Parses whole answers to tuples, without the ids of calls."""

    def __call__(self, tools, text, *, cuts=(), reasoning="none", names=("get", "put"), prompt=""):
        """Returns the merged deltas as tuples."""
        parser = chat_format(None, tools=tools, reasoning=reasoning).parser(
            tools=names if isinstance(names, dict) else {name: {} for name in names},
            prompt=prompt,
        )
        deltas, start = [], 0
        for stop in [*cuts, len(text)]:
            deltas += parser.feed(text[start:stop])
            start = stop
        return self.joined([self.short(delta) for delta in deltas + parser.finish()])

    def joined(self, parts):
        """Merges adjacent deltas of the same part, none of which may be empty."""
        result = []
        for part in parts:
            assert part[-1] != ""
            if result and part[0] != "call" and result[-1][:-1] == part[:-1]:
                result[-1] = (*part[:-1], result[-1][-1] + part[-1])
            else:
                result.append(part)
        return result

    def short(self, delta):
        """Returns a delta as a tuple."""
        match delta:
            case ContentText(text):
                return ("content", text)
            case ReasoningText(text):
                return ("reasoning", text)
            case ToolCallStart(index, _, name):
                return ("call", index, name)
            case ToolCallArguments(index, text):
                return ("arguments", index, text)


@pytest.fixture
def parse():
    return Parse()
