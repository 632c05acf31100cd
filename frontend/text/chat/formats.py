"""Selects a model's answer format, by name or from its chat template, and makes its parser."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frontend.text.chat import harmony
from frontend.text.chat.call_family import CallableTool, CallFamily, CallRules, JsonSchema, TokenIdOf
from frontend.text.chat.families import CALL_FAMILIES, REASONING_FAMILIES
from frontend.text.chat.parser import AnswerParser, StagedParser
from frontend.text.chat.reasoning import ReasoningMarks, ReasoningSplit
from frontend.text.chat.reasoning_rules import reasoning_rules

_HARMONY = "harmony"  # one format for calls and reasoning

_NEWER = {"mistral": "mistral_names"}
"""Families with two formats: the user names the family, and the template decides."""

TOOL_FORMATS = ("auto", "none", *CALL_FAMILIES)
"""Names of the formats of tool calls."""

REASONING_FORMATS = ("auto", "none", *REASONING_FAMILIES, _HARMONY)
"""Names of the marks of reasoning."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Format of one model's reasoning and tool calls. Create it with `chat_format`.

    Attributes:
        tools: name of the format of tool calls, or "none".
        reasoning: name of the marks of reasoning, or "none".
    """

    tools: str
    reasoning: str

    @property
    def message_start(self) -> str:
        """The mark at the start of each message, if the header after it tells what an answer continues; else empty."""
        return harmony.START if self._is_harmony else ""

    def marks(self, *, with_tools: bool) -> frozenset[str]:
        """Returns the texts that a parser needs in the answer even if they are special tokens of the model.

        Args:
            with_tools: whether the request offers tools.
        """
        marks = self._reasoning.texts if self._reasoning else frozenset[str]()
        family = self._family
        return marks | family.marks if family is not None and (with_tools or self._is_harmony) else marks

    def parser(self, *, tools: Mapping[str, JsonSchema] | None = None, prompt: str = "") -> AnswerParser:
        """Returns a parser for one answer.

        Args:
            tools: names of the offered tools, and the schemas of their arguments, empty if unknown; without tools, no
                text is parsed as a call.
            prompt: the rendered prompt, or its end, which may have opened the reasoning; with `message_start`, its last
                message or the start of it.
        """
        tools = tools or {}
        family = self._family if tools or self._is_harmony else None
        marks = self._reasoning
        return StagedParser(
            ReasoningSplit(marks, opened=marks.opened_by(prompt)) if marks else None,
            family.parser(tools, prompt) if family is not None else None,
        )

    def call_rules(self, tools: Sequence[CallableTool], token_id: TokenIdOf, *, one_only: bool) -> CallRules:
        """Returns rules for an answer that must call tools; see `CallFamily.rules`."""
        family = self._family
        assert family is not None, "the model calls no tools"
        return family.rules(tools, token_id, one_only=one_only)

    def before_calls(self, prompt: str, token_id: TokenIdOf) -> str:
        """Returns rules for the output before constrained tool calls; empty: none.

        Args:
            prompt, token_id: see `parser` and `CallFamily.rules`.
        """
        if self._is_harmony:
            return harmony.reasoning_rule(prompt, token_id)
        marks = self._reasoning
        if marks is None:
            return ""
        return reasoning_rules(marks.opening, marks.closing, token_id, opened=marks.opened_by(prompt))

    def answer_start(self, token_id: TokenIdOf) -> str:
        """Returns the start of a constrained answer that may also be calls, in Lark's notation; empty: none."""
        return harmony.answer_start(token_id) if self._is_harmony else ""

    def before_answer(self, prompt: str, token_id: TokenIdOf) -> str:
        """Returns rules for the output before a constrained answer without calls; empty: none.

        Args:
            prompt, token_id: see `before_calls`.
        """
        if self._is_harmony:
            return harmony.reasoning_and_answer_start(prompt, token_id)
        return self.before_calls(prompt, token_id)

    @property
    def _is_harmony(self) -> bool:
        return _HARMONY in (self.tools, self.reasoning)

    @property
    def _family(self) -> CallFamily | None:
        return CALL_FAMILIES.get(_HARMONY if self._is_harmony else self.tools)

    @property
    def _reasoning(self) -> ReasoningMarks | None:
        return None if self._is_harmony else REASONING_FAMILIES.get(self.reasoning)


def chat_format(template_text: str | None, *, tools: str = "auto", reasoning: str = "auto") -> ChatFormat:
    """Returns the format of a model's answers.

    Args:
        template_text: source of the chat template, from which "auto" detects the formats; None without one.
        tools: one of `TOOL_FORMATS`.
        reasoning: one of `REASONING_FORMATS`.

    Raises:
        ValueError: an unknown format.
    """
    for what, name, known in (("tool calls", tools, TOOL_FORMATS), ("reasoning", reasoning, REASONING_FORMATS)):
        if name not in known:
            raise ValueError(f"{name!r} is no format of {what}; known are {', '.join(known)}")
    source = template_text or ""
    newer = _NEWER.get(tools)
    if newer is not None and CALL_FAMILIES[newer].seen.in_template(source):
        tools = newer
    return ChatFormat(
        _guess_tools(source) if tools == "auto" else tools,
        _guess_reasoning(source) if reasoning == "auto" else reasoning,
    )


def _guess_tools(template: str) -> str:
    return next((name for name, family in CALL_FAMILIES.items() if family.seen.in_template(template)), "none")


def _guess_reasoning(template: str) -> str:
    if CALL_FAMILIES[_HARMONY].seen.in_template(template):
        return _HARMONY
    return next((name for name, marks in REASONING_FAMILIES.items() if marks.seen_in(template)), "none")
