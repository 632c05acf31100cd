"""Renders chat messages with the model's Jinja template, as `transformers` does.

Templates come from the model's files, which the operator chose; requests contain only texts, tools and variables as
JSON values. Nevertheless templates run in Jinja's immutable sandbox: no access to Python's internals, no changes to
their input, `range` limited to 100,000 and output to `MAX_RENDERED_CHARS`. The sandbox does not limit time and memory,
so compiling and rendering run in a killable process (`chat_template_worker.py`).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from frontend.text.chat.messages import ChatMessage, ChatOptions
from frontend.text.chat.template_kwargs import OWN_NAMES
from frontend.text.chat.template_turns import (
    CallForm,
    find_call_form,
    first_left_out,
    template_messages,
    with_tools_in_system,
)

MAX_RENDERED_CHARS = 1_000_000
"""Maximum length of a rendered prompt; over 200,000 tokens of ordinary text."""


class ChatTemplateError(Exception):
    """The template does not compile, or raised an error for these messages."""


class _GenerationBlock(jinja2.ext.Extension):
    """Ignores the tag `{% generation %}`, which marks the assistant's text for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter, which escapes HTML; models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # generates text of any length; no template needs it
    return environment


class ChatTemplate:
    """One model's template.

    Args:
        source: the Jinja template.
        variables: variables besides the messages: bos_token, eos_token, ...
        default_kwargs: further variables, for conversations that do not set them.

    Raises:
        ChatTemplateError: the source cannot be compiled, or a default has a reserved name.

    Attributes:
        source: as given.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], default_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise ChatTemplateError("it is nested too deeply") from None
        except (SyntaxError, OverflowError, ValueError) as error:  # in the Python code that Jinja generates
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        self._loops_over_content = any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
        tested = (test.node for test in tree.find_all(jinja2.nodes.Test) if test.name == "string")
        self._takes_parts_only = self._loops_over_content and not any(_is_content(node) for node in tested)
        self._takes_tools_of_system = "tools" not in jinja2.meta.find_undeclared_variables(tree) and any(
            map(_is_tools, tree.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem)))
        )
        self._reserved = {*OWN_NAMES, *variables, *environment.globals}
        self._check_names(default_kwargs or {}, " in --default-chat-template-kwargs")
        self._variables = {"documents": None, **variables, **(default_kwargs or {})}

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions | None = None) -> str:
        """Renders the conversation as one prompt.

        Content with several texts is passed as a list of parts if the template loops over content, otherwise as lines
        of one text. A single text is passed as a list with one part only if the template accepts nothing else. The role
        "developer" becomes "system" if the template does not know it. A template that reads tools only from messages
        gets them in the system message. Turns with tool calls have the form that the template renders
        (`find_call_form`).

        Args:
            messages: oldest first.
            options: None: no tools, and the assistant's message is opened at the end.

        Raises:
            ChatTemplateError: the template rejects these messages (`raise_exception`), fails, violates the sandbox, or
                produces more than `MAX_RENDERED_CHARS` characters; it leaves out a message of an unusual role; a
                variable has a reserved name; or there is no final message to continue.
            MemoryError: it exceeds the memory limit.
        """
        options = options or ChatOptions()
        self._check_names(options.template_kwargs)
        if (index := first_left_out(messages, self._render_or_nothing)) is not None:
            raise ChatTemplateError(f"it leaves out messages[{index}], whose role is {messages[index].role[:64]!r}")
        form = self._call_form if any(message.tool_calls for message in messages) else None
        return self._render(messages, options, form)

    def _check_names(self, kwargs: Mapping[str, Any], place: str = "") -> None:
        for name in kwargs:
            if name in self._reserved:
                raise ChatTemplateError(f"the variable {name!r}{place} is the template's own and cannot be set")

    @functools.cached_property
    def _call_form(self) -> CallForm:
        """Form of turns with tool calls. Found at the first such turn: other conversations do not pay for it."""
        return find_call_form(self._render_or_nothing)

    def _render_or_nothing(self, messages: Sequence[ChatMessage], options: ChatOptions, form: CallForm | None) -> str:
        try:
            return self._render(messages, options, form)
        except ChatTemplateError:
            return ""

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions, form: CallForm | None) -> str:
        turns = template_messages(
            messages,
            content_as_parts=self._loops_over_content,
            text_as_parts=self._takes_parts_only,
            knows_developer="developer" in self.source,
            call_form=form,
        )
        if options.tools and self._takes_tools_of_system:
            turns = with_tools_in_system(turns, options.tools)
        if options.continue_final_message:
            _mark_end(turns)
        prompt = self._generate(
            {
                **self._variables,
                **options.template_kwargs,
                "messages": turns,
                "tools": list(options.tools) or None,
                "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
            }
        )
        return _cut_at_mark(prompt) if options.continue_final_message else prompt

    def _generate(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the rendered prompt has more than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except (ChatTemplateError, MemoryError):
            raise
        except Exception as error:  # a template is a program: it may raise anything for these messages
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return _checked_text("".join(parts))


def _checked_text(prompt: str) -> str:
    """Checks that UTF-8 can encode the prompt; JSON may contain half a surrogate pair, which it cannot."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ChatTemplateError(f"the prompt has half a character: {prompt[error.start]!r}") from error
    return prompt


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Returns whether an expression is a message's content: `.content`, `['content']` or the variable `content`."""
    match node:
        case jinja2.nodes.Name(name="content") | jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Filter(node=jinja2.nodes.Node() as filtered):
            return _is_content(filtered)
    return False


def _is_tools(node: jinja2.nodes.Node) -> bool:
    """Returns whether an expression is the tools of something: `.tools` or `['tools']`."""
    match node:
        case jinja2.nodes.Getattr(attr="tools") | jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="tools")):
            return True
    return False


_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue; its trailing space shows whether the template strips whitespace."""


def _mark_end(turns: list[Any]) -> None:
    content = turns[-1]["content"]
    if isinstance(content, str):
        turns[-1]["content"] = content + _END_MARK
    elif content:
        content[-1]["text"] += _END_MARK
    else:
        raise ChatTemplateError("the final message has no content to continue")


def _cut_at_mark(prompt: str) -> str:
    end = prompt.rfind(_END_MARK.strip())
    if end < 0:
        raise ChatTemplateError("the final message cannot be continued: the template leaves it out")
    if prompt.startswith(_END_MARK, end):
        return prompt[:end]
    return prompt[:end].rstrip()  # the template strips whitespace at the end of messages
