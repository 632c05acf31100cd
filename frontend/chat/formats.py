"""Which marks a model uses, chosen by name or guessed from its chat template, and the parser for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from frontend.chat import mistral
from frontend.chat.call_ids import long_call_id, short_call_id
from frontend.chat.call_output import CallOutput
from frontend.chat.call_rules import CallableTool, CallRules, TokenIdOf, call_rules, reasoning_rules
from frontend.chat.hermes import HermesCalls
from frontend.chat.hidden import HiddenTexts
from frontend.chat.llama3 import Llama3Calls
from frontend.chat.marks import mark_finder
from frontend.chat.mistral import MistralCalls
from frontend.chat.parser import AnswerParser, StagedParser
from frontend.chat.reasoning import ReasoningMarks, ReasoningSplit

TOOL_FORMATS = ("auto", "none", "hermes", "llama3", "mistral")
"""Names of the formats of tool calls."""

REASONING_FORMATS = ("auto", "none", "think", "mistral")
"""Names of the marks of reasoning."""

_REASONING_MARKS = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How one model marks reasoning and tool calls. Made by `chat_format`.

    Attributes:
        tools: name of the format of tool calls, or "none".
        reasoning: name of the marks of reasoning, or "none".
        names_first: whether Mistral's calls are names with arguments, and not a list of objects.
    """

    tools: str
    reasoning: str
    names_first: bool = False

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the marks are special tokens: then ask for the answer with `keep_special_tokens`, and give `parser`
        the tokenizer's special tokens, so that it leaves the others out.
        """
        return "mistral" in (self.tools, self.reasoning)

    def parser(
        self, *, tool_names: Collection[str] = (), prompt: str = "", special_tokens: Collection[str] = ()
    ) -> AnswerParser:
        """A fresh parser for one answer.

        Args:
            tool_names: the tools the request offers; with none, nothing is taken for a call.
            prompt: the rendered prompt, or its end: whether it opened the reasoning.
            special_tokens: texts to leave out of the answer; the marks themselves may be among them and are read.
        """
        marks = _REASONING_MARKS.get(self.reasoning)
        shown = {marks.opening, marks.closing} if marks else set()
        if self.tools == "mistral" and tool_names:
            shown |= mistral.MARKS
        hidden = frozenset(special_tokens) - shown - {""}
        return StagedParser(
            HiddenTexts(mark_finder(hidden)) if hidden else None,
            ReasoningSplit(marks, opened=marks.opened_by(prompt)) if marks else None,
            self._calls(tool_names) if tool_names else None,
        )

    def call_rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """Rules for an answer that must call tools; see `call_rules`."""
        style = "mistral names" if self.tools == "mistral" and self.names_first else self.tools
        return call_rules(style, tools, token_id, one_only=one_only)

    def before_answer(self, prompt: str, token_id: TokenIdOf) -> str:
        """Rules for what comes before an answer that is held to a form; empty: nothing does.

        Args:
            prompt, token_id: see `parser` and `call_rules`.
        """
        marks = _REASONING_MARKS.get(self.reasoning)
        if marks is None:
            return ""
        return reasoning_rules(marks.opening, marks.closing, token_id, opened=marks.opened_by(prompt))

    def _calls(self, tool_names: Collection[str]) -> AnswerParser | None:
        match self.tools:
            case "hermes":
                return HermesCalls(CallOutput(long_call_id))
            case "llama3":
                return Llama3Calls(CallOutput(long_call_id), tool_names)
            case "mistral":
                return MistralCalls(CallOutput(short_call_id))
        return None


def chat_format(template_text: str | None, *, tools: str = "auto", reasoning: str = "auto") -> ChatFormat:
    """The format of a model's answers.

    Args:
        template_text: source of its chat template, for what is "auto"; None if it has none.
        tools: one of `TOOL_FORMATS`.
        reasoning: one of `REASONING_FORMATS`.

    Raises:
        ValueError: no such format.
    """
    for what, name, known in (("tool calls", tools, TOOL_FORMATS), ("reasoning", reasoning, REASONING_FORMATS)):
        if name not in known:
            raise ValueError(f"{name!r} is no format of {what}; known are {', '.join(known)}")
    source = template_text or ""
    return ChatFormat(
        _guess_tools(source) if tools == "auto" else tools,
        _guess_reasoning(source) if reasoning == "auto" else reasoning,
        names_first="[ARGS]" in source,
    )


def _guess_tools(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # others write other things than JSON between the same marks
        return "none" if "<function=" in template or "<arg_key>" in template else "hermes"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3"
    return "none"


def _guess_reasoning(template: str) -> str:
    for name, marks in _REASONING_MARKS.items():
        if marks.closing in template:
            return name
    return "none"
