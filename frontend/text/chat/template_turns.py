"""Converts messages to the dictionaries that a chat template expects.

Templates expect different forms of an assistant's turn with tool calls. One that gets another form raises an error, or
omits the calls. Only the template itself shows its form, so `find_call_form` renders probe conversations with it.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of an assistant's turns with tool calls.

    Attributes:
        arguments_as_text: pass arguments as JSON text instead of an object.
        none_for_no_content: pass None instead of an empty content.
        content_in_reasoning: append the content to the reasoning.
        one_call_per_turn: divide a turn with several calls into turns of one call, each followed by its results.
        short_ids: replace ids of calls that are not nine letters and digits.
    """

    arguments_as_text: bool = False
    none_for_no_content: bool = False
    content_in_reasoning: bool = False
    one_call_per_turn: bool = False
    short_ids: bool = False


_FORMS = [CallForm(text, none != text, *rest) for text, none, *rest in itertools.product((False, True), repeat=4)]
"""Forms, the preferred first. With arguments as text, "" as content makes some templates add an empty answer."""


def _probe_call(name: str) -> ToolCall:
    """Returns a call whose id contains its name, as for Kimi, in nine letters and digits, as for Mistral."""
    return ToolCall(f"{name}1", name, json.dumps({"value": name.upper()}))


_CALLS = (_probe_call("probeone"), _probe_call("probetwo"))
_PROBES = (
    ChatMessage("assistant", tool_calls=_CALLS[:1]),
    ChatMessage("assistant", tool_calls=_CALLS),
    ChatMessage("assistant", "content", reasoning="reasoning", tool_calls=_CALLS[:1]),
)
"""Turns that the form must render, the most important first."""

_OTHER_IDS = ("1", "call_0123456789abcdef01234567")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

_PROBE_TOOL = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_PROBE_OPTIONS = ChatOptions(tools=({"type": "function", "function": _PROBE_TOOL},))


def find_call_form(render: Callable[[Sequence[ChatMessage], ChatOptions, CallForm], str]) -> CallForm:
    """Returns the first form in which a template renders the calls of all probes.

    If no form renders a probe, that probe does not count. For a template that renders no calls this is the default.
    Ids are short if the template accepts the probes' own, but rejects those of other servers. A prompt without the name
    of a call is no rejection: Kimi's template renders the id in its place.

    Args:
        render: renders a conversation; returns an empty text if the template rejects it.
    """

    def prompt(turn: ChatMessage, form: CallForm) -> str:
        results = [ChatMessage("tool", "result", tool_call_id=call.call_id) for call in turn.tool_calls]
        return render([ChatMessage("user", "question"), turn, *results], _PROBE_OPTIONS, form)

    forms = _FORMS
    for turn in _PROBES:
        forms = [form for form in forms if _has_calls(prompt(turn, form), turn)] or forms
    form, turn = forms[0], _PROBES[0]
    others = [replace(turn, tool_calls=(replace(turn.tool_calls[0], call_id=call_id),)) for call_id in _OTHER_IDS]
    return replace(form, short_ids=bool(prompt(turn, form)) and not all(prompt(other, form) for other in others))


def _has_calls(prompt: str, turn: ChatMessage) -> bool:
    """Returns whether a prompt has the calls' names and arguments, and not in Python's notation."""
    return all(
        call.name in prompt and call.name.upper() in prompt and str(json.loads(call.arguments)) not in prompt
        for call in turn.tool_calls
    )


_USUAL_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def first_left_out(
    messages: Sequence[ChatMessage], render: Callable[[Sequence[ChatMessage], ChatOptions, None], str]
) -> int | None:
    """Returns the index of the first message that a template would silently leave out for its role; None: there is
    none. The roles of OpenAI's API are not checked.

    Args:
        render: see `find_call_form`.
    """
    is_left_out = functools.cache(functools.partial(_is_left_out, render))
    return next(
        (i for i, one in enumerate(messages) if one.role not in _USUAL_ROLES and is_left_out(one.role)),
        None,
    )


def _is_left_out(render: Callable[[Sequence[ChatMessage], ChatOptions, None], str], role: str) -> bool:
    """Returns whether a template renders no turn of a role, and does not reject it either."""
    question, probe = ChatMessage("user", "question"), ChatMessage(role, "probecontent")
    prompts = [render(turns, ChatOptions(), None) for turns in ([question, probe], [probe, question])]
    return any(prompts) and not any("probecontent" in prompt for prompt in prompts)


def template_messages(
    messages: Sequence[ChatMessage],
    *,
    content_as_parts: bool,
    text_as_parts: bool,
    knows_developer: bool = True,
    call_form: CallForm | None = None,
) -> list[Any]:
    """Converts messages to the dictionaries that templates expect, with "role", "content" and optional keys.

    Args:
        messages: oldest first.
        content_as_parts: pass several texts as a list of parts instead of joining them with line breaks.
        text_as_parts: pass a single text as a list with one part.
        knows_developer: whether the template knows the role "developer"; if not, it is replaced by "system".
        call_form: form of the assistant's turns with tool calls; None: the default.
    """
    call_form = call_form or CallForm()
    if call_form.one_call_per_turn:
        messages = _with_one_call_per_turn(messages)
    if call_form.content_in_reasoning:
        messages = [_with_content_in_reasoning(message) if message.tool_calls else message for message in messages]
    turns = [_template_message(message, content_as_parts, text_as_parts, call_form) for message in messages]
    for turn in turns:
        if turn["role"] == "developer" and not knows_developer:
            turn["role"] = "system"
    return turns


def with_tools_in_system(turns: Sequence[Any], tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns turns whose system message has the tools' functions as a JSON list, as Phi-4-mini's template expects.

    Args:
        turns: see `template_messages`; a system message is added if there is none.
        tools: see `ChatOptions`.
    """
    functions = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    is_system = [turn["role"] == "system" for turn in turns]
    if not any(is_system):
        return [{"role": "system", "content": "", "tools": functions}, *turns]
    place = is_system.index(True)
    return [*turns[:place], {**turns[place], "tools": functions}, *turns[place + 1 :]]


def _with_one_call_per_turn(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Divides turns with several calls. Content and reasoning stay before the first call.

    Results without the id of a call in the turn before them follow the last call.
    """
    groups: list[list[ChatMessage]] = []
    group_of: dict[str, list[ChatMessage]] = {}  # by call id, until the next turn that is not a result
    for message in messages:
        if message.tool_call_id in group_of:
            group_of[message.tool_call_id].append(message)
            continue
        if not message.tool_call_id:
            group_of = {}
        if not message.tool_calls:
            groups.append([message])
        for number, call in enumerate(message.tool_calls):
            turn = replace(message, tool_calls=(call,))
            groups.append([replace(turn, content="", reasoning="") if number else turn])
            group_of[call.call_id] = groups[-1]
    return list(itertools.chain.from_iterable(groups))


def _with_content_in_reasoning(message: ChatMessage) -> ChatMessage:
    content = message.content if isinstance(message.content, str) else "\n".join(message.content)
    return replace(message, content="", reasoning="\n\n".join(filter(None, (message.reasoning, content))))


def _template_message(
    message: ChatMessage, content_as_parts: bool, text_as_parts: bool, call_form: CallForm
) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, str):
        turn["content"] = [_part(message.content)] if text_as_parts else message.content
    else:
        turn["content"] = [_part(text) for text in message.content] if content_as_parts else "\n".join(message.content)
    if message.name:
        turn["name"] = message.name
    if message.reasoning:  # under all names that templates use
        turn |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning, "thinking": message.reasoning}
    if message.tool_calls:
        if call_form.none_for_no_content and not any(message.content):
            turn["content"] = None
        arguments_of = _arguments_text if call_form.arguments_as_text else _arguments
        turn["tool_calls"] = [
            {
                "id": _id(call.call_id, call_form),
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        turn["tool_call_id"] = _id(message.tool_call_id, call_form)
    return turn


def _id(call_id: str, call_form: CallForm) -> str:
    """Returns the id of a call for the template; equal ids stay equal in all requests, for the prefix cache."""
    if not call_form.short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _arguments_text(call: ToolCall) -> str:
    return call.arguments or "{}"


def _arguments(call: ToolCall) -> Any:
    """Returns the arguments as an object if they are one, because templates would quote a text once more."""
    try:
        arguments = json.loads(_arguments_text(call))
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments
