"""Renders chat messages with the model's Jinja template, as `transformers` does.

Templates come from the model's files, chosen by the operator; a request brings texts, tools and variables as plain JSON
values, never a template. They run in Jinja's immutable sandbox all the same: no access to Python's internals, no
changes to what they are given, `range` limited to 100,000, output limited to `MAX_RENDERED_CHARS`. Neither this nor
compiling limits time and memory: both happen in a process that may be killed (`template_worker.py`).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from frontend.text.chat.messages import ChatMessage, ChatOptions, template_messages

MAX_RENDERED_CHARS = 1_000_000
"""Longest prompt a template may produce; over 200,000 tokens of ordinary text."""


class ChatTemplateError(Exception):
    """The template does not compile, or refuses or fails on these messages; has its message."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as if the tag were not
    there.
    """

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
    """Jinja's own filter escapes HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # makes text of any length; no chat needs it
    return environment


class ChatTemplate:
    """One model's template.

    Args:
        source: the Jinja template.
        variables: what it may use besides the messages: bos_token, eos_token, ...

    Raises:
        ChatTemplateError: the source cannot be compiled.

    Attributes:
        source: as given.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = {"documents": None, **variables}
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise ChatTemplateError("it is nested too deeply") from None
        except (SyntaxError, OverflowError, ValueError) as error:  # of the Python that Jinja makes of it
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        self._loops_over_content = any(_is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))
        tested = (test.node for test in tree.find_all(jinja2.nodes.Test) if test.name == "string")
        self._takes_parts_only = self._loops_over_content and not any(_is_content(node) for node in tested)
        self._reserved = {"messages", "tools", "add_generation_prompt", *variables, *environment.globals}

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions | None = None) -> str:
        """Renders the conversation as one prompt.

        A content of several texts is given as a list of parts to a template that loops over contents, else as lines of
        one text; a single text as a list of one part only to a template that knows no other content. The role
        "developer" is "system" to a template that does not know it.

        Args:
            messages: the turns, oldest first.
            options: None: no tools, the assistant's turn opened at the end.

        Raises:
            ChatTemplateError: the template refuses these messages (`raise_exception`), fails on them, reaches for what
                the sandbox forbids, or produces more than `MAX_RENDERED_CHARS` characters; a variable has the name of
                one of its own; there is no final message to continue.
            MemoryError: it takes more memory than there may be.
        """
        options = options or ChatOptions()
        for name in options.template_kwargs:
            if name in self._reserved:
                raise ChatTemplateError(f"the variable {name!r} is the template's own and cannot be set")
        turns = template_messages(
            messages,
            content_as_parts=self._loops_over_content,
            text_as_parts=self._takes_parts_only,
            knows_developer="developer" in self.source,
        )
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
        except Exception as error:  # a template is a program: any error of its own is about these messages
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return _checked_text("".join(parts))


def _checked_text(prompt: str) -> str:
    """JSON in a request can escape half a character, which no encoding takes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ChatTemplateError(f"the prompt has half a character: {prompt[error.start]!r}") from error
    return prompt


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Whether an expression is a message's content: `message.content`, `message['content']`, or a variable so named."""
    match node:
        case jinja2.nodes.Name(name="content") | jinja2.nodes.Getattr(attr="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case jinja2.nodes.Filter(node=jinja2.nodes.Node() as filtered):
            return _is_content(filtered)
    return False


_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Ends the message to continue and is found again in the prompt; its space shows whether the template trims."""


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
    return prompt[:end].rstrip()  # the template trims: what the message ended with is not in the prompt either
