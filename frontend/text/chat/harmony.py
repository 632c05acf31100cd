"""OpenAI's harmony format, which gpt-oss writes: an answer is a sequence of messages with headers.

    <|channel|>analysis<|message|>...<|end|>                                            reasoning
    <|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{...}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>...<|return|>                          content

The recipient may also precede the channel. Commentary without a recipient is content, as is text without a header.
Messages to recipients other than functions are reasoning.
"""

import enum
import re
from collections.abc import Mapping, Sequence

from frontend.text.chat.call_family import (
    TOOL_NAME,
    CallableTool,
    CallRules,
    JsonSchema,
    TemplateSigns,
    TokenIdOf,
    lark_sequence,
)
from frontend.text.chat.call_ids import long_call_id
from frontend.text.chat.call_output import CallOutput, merged
from frontend.text.chat.call_parser import CallParser
from frontend.text.chat.call_reader import ArgumentsReader, ReaderStatus
from frontend.text.chat.deltas import ContentText, Delta, ReasoningText
from frontend.text.chat.marks import mark_finder

START = "<|start|>"
MARKS = frozenset({START, "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"})
_ENDS = frozenset({"<|start|>", "<|end|>", "<|call|>", "<|return|>"})
_BEGINNINGS = ("<|start|>", "<|channel|>", "<|message|>", "assistant", "to=")
_MOST_IN_HEADER = 300
_RECIPIENT = r"(?:to=(?P<{}>[\w.\-]{{1,140}}) ?)?"
_HEADER = re.compile(  # after whitespace is collapsed to single blanks
    r"(?:<\|start\|> ?)?(?:assistant ?)?"
    + _RECIPIENT.format("early")
    + r"(?:<\|channel\|> ?(?P<channel>\w+) ?)?"
    + _RECIPIENT.format("late")
    + r"(?:<\|constrain\|> ?)?\w*"
)
_FUNCTION = re.compile(rf"functions\.({TOOL_NAME})")


class HarmonyFamily:
    """The harmony format; a `CallFamily` whose parser also separates the reasoning."""

    seen = TemplateSigns((("<|channel|>", "<|message|>"),))
    marks = MARKS

    def parser(self, tools: Mapping[str, JsonSchema], prompt: str) -> "HarmonyParser":
        """See `CallFamily`."""
        return HarmonyParser(CallOutput(long_call_id), prompt, with_calls=bool(tools))

    def rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:  # noqa: ARG002
        """See `CallFamily`. There is always one call, because a call ends the answer."""
        calls = []
        for index, tool in enumerate(tools):
            header = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
            calls.append(f"{lark_sequence(header, MARKS, token_id)} @arguments_{index}")
        return CallRules.with_json_arguments(f"calls: {' | '.join(calls)}", tools)


def reasoning_rule(prompt: str, token_id: TokenIdOf) -> str:
    """Returns rules for optional reasoning before a call, first `before`; empty if the prompt opened a message."""
    return "" if _is_inside(prompt) else f"before: | reasoned\n{_reasoned(token_id)}"


def reasoning_and_answer_start(prompt: str, token_id: TokenIdOf) -> str:
    """Returns rules for optional reasoning and the start of the final message; empty if the prompt opened a message."""
    return "" if _is_inside(prompt) else f"before: reasoned? {answer_start(token_id)}\n{_reasoned(token_id)}"


def answer_start(token_id: TokenIdOf) -> str:
    """Returns the start of a final message in Lark's notation."""
    return lark_sequence("<|channel|>final<|message|>", MARKS, token_id)


def _reasoned(token_id: TokenIdOf) -> str:
    start = lark_sequence("<|channel|>analysis<|message|>", MARKS, token_id)
    then = lark_sequence("<|start|>assistant", MARKS, token_id)
    end_id = token_id("<|end|>")
    if end_id is None:
        return f"reasoned: {start} thought {then}\nthought[lazy]: /(?s:.*)<\\|end\\|>/"
    return f"reasoned: {start} THOUGHT? <[{end_id}]> {then}\nTHOUGHT: /(?s:.+)/"


def _is_inside(prompt: str) -> bool:
    """Returns whether a prompt ends inside a message, which the answer continues."""
    return "<|message|>" in prompt.rpartition("<|start|>")[2]


class _Place(enum.Enum):
    HEADER = "header"
    BODY = "body"
    CALL = "call"
    SKIPPED = "skipped"  # after the arguments of a call, until its message ends


class HarmonyParser(CallParser):
    """Parses one answer into reasoning, content and calls; an `AnswerParser`.

    Args:
        prompt: the rendered prompt; the answer may continue the message at its end.
        with_calls: whether tools were offered; if not, messages to functions are content.
    """

    def __init__(self, output: CallOutput, prompt: str, *, with_calls: bool) -> None:
        super().__init__(output)
        self._with_calls = with_calls
        self._ends = mark_finder(_ENDS)
        self._headers = mark_finder(frozenset({"<|message|>"}))
        self._deltas: list[Delta] = []
        self._is_reasoning = False
        self._reader = ArgumentsReader("")
        self._has_begun = False  # whether the arguments of the call have started
        self._begins = True  # at the start of a message, which is separated from earlier text by a line break
        self._has_reasoned = self._has_content = False
        self._place = _Place.HEADER
        if _is_inside(prompt):
            self._is_reasoning = "<|channel|>analysis" in prompt.rpartition("<|start|>")[2]
            self._place = _Place.BODY

    def finish(self) -> list[Delta]:
        """Ends the answer; returns what was held back."""
        is_header = self._place is _Place.HEADER and any(mark in self._text for mark in MARKS)
        if self._place is _Place.BODY or (self._place is _Place.HEADER and not is_header):
            self._say(self._text)
        self._text = ""
        self._deltas += self._output.finish()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = merged(self._deltas), []
        return deltas

    def _advance(self) -> bool:
        match self._place:
            case _Place.HEADER:
                return self._read_header()
            case _Place.BODY:
                return self._read_body()
            case _Place.CALL:
                return self._read_call()
            case _Place.SKIPPED:
                return self._find_end()[1]

    def _read_header(self) -> bool:
        text = self._text.lstrip()
        if not any(text.startswith(mark) or mark.startswith(text) for mark in _BEGINNINGS):
            return self._enter_body(is_reasoning=False)
        found = self._headers.find(self._text[:_MOST_IN_HEADER])
        if found.mark is None and len(self._text) < _MOST_IN_HEADER:
            return False
        header = _HEADER.fullmatch(" ".join(found.before.split())) if found.mark else None
        if header is None:
            return self._give_up_header()
        self._text = self._text[len(found.before) + len("<|message|>") :]
        recipient = header["late"] or header["early"] or ""
        function = _FUNCTION.fullmatch(recipient)
        if function is not None and self._with_calls:
            self._output.open("")
            self._reader, self._has_begun = ArgumentsReader(function[1]), False
            self._place = _Place.CALL
            return True
        is_other = bool(recipient) and function is None
        return self._enter_body(is_reasoning=is_other or header["channel"] == "analysis")

    def _give_up_header(self) -> bool:
        """Takes text that only resembles a header as content, at least its start."""
        self._enter_body(is_reasoning=False)
        self._begins = False
        space, start, rest = self._text.partition("<|start|>")
        if not space.strip() and start:
            self._say(space + start)
            self._text = rest
        return True

    def _enter_body(self, *, is_reasoning: bool) -> bool:
        self._is_reasoning, self._begins = is_reasoning, True
        self._place = _Place.BODY
        return True

    def _find_end(self) -> tuple[str, bool]:
        """Takes the text up to the end of the message; returns it and whether the message has ended."""
        found = self._ends.find(self._text)
        self._text = found.rest
        if found.mark is None:
            return found.before, False
        self._place = _Place.HEADER
        if found.mark == "<|start|>":
            self._text = found.mark + self._text
        return found.before, True

    def _read_body(self) -> bool:
        text, has_ended = self._find_end()
        self._say(text)
        return has_ended

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._is_reasoning:
            line_break = "\n" if self._begins and self._has_reasoned else ""
            self._deltas.append(ReasoningText(line_break + text))
            self._has_reasoned = True
        else:
            line_break = "\n" if self._begins and self._has_content else ""
            self._deltas.append(ContentText(line_break + text))
            self._has_content = True
        self._begins = False

    def _read_call(self) -> bool:
        if not self._has_begun and not self._begin_arguments():
            return self._place is _Place.BODY
        status = self._read_json(self._reader)
        self._deltas += self._output.take()
        if status is ReaderStatus.COMPLETE:
            self._place = _Place.SKIPPED
        elif status is ReaderStatus.FAILED:
            self._enter_body(is_reasoning=False)
        return bool(self._text)

    def _begin_arguments(self) -> bool:
        """Returns whether arguments start here. An empty message is a call without arguments; other text is content."""
        text = self._text.lstrip()
        has_ended = any(text.startswith(end) for end in _ENDS)
        if not has_ended and any(end.startswith(text) for end in _ENDS):
            return False
        self._has_begun = True
        self._text = "{}" + text if has_ended else text
        if self._text[0] != "{":
            self._enter_body(is_reasoning=False)
            return False
        return True
