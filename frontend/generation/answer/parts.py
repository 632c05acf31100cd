"""Splits chat answers into text, reasoning and tool calls of the public proto; `frontend.text.chat` knows the models'
formats.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest
from frontend.request.request import ChatPrompt
from frontend.text.chat import (
    AnswerParser,
    ChatFormat,
    ContentText,
    Delta,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.text.tokenizer import Tokenizer

_MOST_TOKENS = 64  # of a prompt: more than any mark and the space after it, or the header of a message


class Parts(NamedTuple):
    """What a piece of text adds to each part of an answer; reasoning comes before text, and text before tool calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[pb.ToolCallDelta] = ()


def parts_of(deltas: Sequence[Delta]) -> list[Parts]:
    """Groups deltas by part, as few times as their order allows: text after a tool call is in another group."""
    groups = [Parts()]
    for delta in deltas:
        parts = groups[-1]
        match delta:
            case ReasoningText() if not parts.text and not parts.tool_calls:
                groups[-1] = parts._replace(reasoning=parts.reasoning + delta.text)
            case ReasoningText():
                groups.append(Parts(reasoning=delta.text))
            case ContentText() if not parts.tool_calls:
                groups[-1] = parts._replace(text=parts.text + delta.text)
            case ContentText():
                groups.append(Parts(delta.text))
            case ToolCallStart() | ToolCallArguments():
                groups[-1] = parts._replace(tool_calls=(*parts.tool_calls, _call_delta(delta)))
    return groups


def parts_by_token(deltas: Sequence[tuple[int, Sequence[Delta]]]) -> list[tuple[int, Parts]]:
    """Groups deltas by kind of part, so that each group ends at a token that added to it, in any batch.

    Tokens without text, such as special tokens, are at the start of a group only. So readers find the tokens of a text
    by their bytes.

    Args:
        deltas: with the number of tokens up to their end.

    Returns: the groups, each with the number of tokens up to its end.
    """
    groups: list[tuple[int, Parts]] = []
    end_before = 0
    for end, added in deltas:
        for parts in filter(any, parts_of(added)):
            kinds = [bool(part) for part in parts]
            is_next = bool(groups) and groups[-1][0] >= end_before
            if is_next and sum(kinds) == 1 and kinds == [bool(part) for part in groups[-1][1]]:
                before = groups.pop()[1]
                parts = Parts(
                    before.text + parts.text,
                    before.reasoning + parts.reasoning,
                    (*before.tool_calls, *parts.tool_calls),
                )
            groups.append((end, parts))
        end_before = end
    return groups


def _call_delta(delta: ToolCallStart | ToolCallArguments) -> pb.ToolCallDelta:
    if isinstance(delta, ToolCallStart):
        return pb.ToolCallDelta(index=delta.index, id=delta.call_id, name=delta.name)
    return pb.ToolCallDelta(index=delta.index, arguments_json=delta.text)


class AnswerParsing:
    """Parses the answers to one conversation.

    Args:
        chat: the conversation.
        chat_format: how the model marks reasoning and calls.
        tokenizer: the model's.

    Attributes:
        marks: special tokens that must have text for `parser`.

    Raises:
        InvalidRequest: the format of the model's tool calls is unknown.
    """

    def __init__(self, chat: ChatPrompt, chat_format: ChatFormat, tokenizer: Tokenizer) -> None:
        self._tools = dict(_tool(tool) for tool in chat.options.tools)
        if self._tools and chat_format.tools == "none":
            raise InvalidRequest(
                "tools are not served with this model: its chat template shows no known format of tool calls, and the "
                "server's --tool-call-parser names none",
                field="spec.chat.tools_json",
            )
        marks = chat_format.marks(with_tools=bool(self._tools))
        token_ids = map(tokenizer.special_token_id, marks)
        self.marks = frozenset(token_id for token_id in token_ids if token_id is not None)
        self._chat_format = chat_format
        self._tokenizer = tokenizer

    def before_constraint(self, prompt_ids: Sequence[int], *, with_calls: bool) -> str:
        """Returns grammar rules for the output before the constrained part of an answer.

        Args:
            prompt_ids: see `parser`.
            with_calls: whether the constraint allows tool calls.
        """
        rules = self._chat_format.before_calls if with_calls else self._chat_format.before_answer
        return rules(self._answer_place(prompt_ids), self._tokenizer.special_token_id)

    def parser(self, prompt_ids: Sequence[int]) -> AnswerParser:
        """Returns a parser for one answer.

        Args:
            prompt_ids: the prompt, which may have opened the reasoning.
        """
        return self._chat_format.parser(tools=self._tools, prompt=self._answer_place(prompt_ids))

    def _answer_place(self, prompt_ids: Sequence[int]) -> str:
        """Returns the part of a prompt that tells what the answer continues."""
        start_id = self._tokenizer.special_token_id(self._chat_format.message_start)
        ids = prompt_ids[-_MOST_TOKENS:]
        if start_id is not None and start_id in prompt_ids:
            start = len(prompt_ids) - 1 - prompt_ids[::-1].index(start_id)
            ids = prompt_ids[start : start + _MOST_TOKENS]
        detokenizer = self._tokenizer.detokenizer(keep_special_tokens=True)
        return detokenizer.push(ids) + detokenizer.finish()


def _tool(tool: object) -> tuple[str, Mapping[str, Any]]:
    """Returns a tool's name and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, dict) else None
    function = function if isinstance(function, dict) else {}
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("a tool has no function with a name", field="spec.chat.tools_json")
    return name, parameters if isinstance(parameters, dict) else {}
