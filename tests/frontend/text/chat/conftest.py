"""What the tests of answers share."""

import pytest

from frontend.text.chat import ContentText, ReasoningText, ToolCallArguments, ToolCallStart, chat_format


class Parse:
    """Parses whole answers; ids of calls are left out of what comes back."""

    def __call__(self, tools, text, *, cuts=(), reasoning="none", names=("get", "put"), prompt="", special_tokens=()):
        """The deltas as short tuples, neighbours joined."""
        parser = chat_format(None, tools=tools, reasoning=reasoning).parser(
            tools=names if isinstance(names, dict) else {name: {} for name in names},
            prompt=prompt,
            special_tokens=special_tokens,
        )
        deltas, start = [], 0
        for stop in [*cuts, len(text)]:
            deltas += parser.feed(text[start:stop])
            start = stop
        return self.joined([self.short(delta) for delta in deltas + parser.finish()])

    def joined(self, parts):
        """Neighbours that go on with one another as one; none may be empty."""
        result = []
        for part in parts:
            assert part[-1] != ""
            if result and part[0] != "call" and result[-1][:-1] == part[:-1]:
                result[-1] = (*part[:-1], result[-1][-1] + part[-1])
            else:
                result.append(part)
        return result

    def short(self, delta):
        """One delta as a tuple."""
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
