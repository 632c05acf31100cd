"""Chat messages to prompt text with the model's own Jinja template, rendered as `transformers` renders it.

Templates come from the model's files, chosen by the operator; a request brings message texts only, neither a template
nor variables for it. They run in Jinja's immutable sandbox all the same: no access to Python's internals, no changes to
what they are given, `range` limited to 100,000, output limited to `MAX_RENDERED_CHARS`. What the sandbox does not limit
is time: a template that loops for ever without output is the operator's own.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MAX_RENDERED_CHARS = 1_000_000
"""Longest prompt a template may produce; over 200,000 tokens of ordinary text."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation.

    Attributes:
        role: who speaks: "system", "user", "assistant", or what the model's template knows.
        content: what is said.
    """

    role: str
    content: str


class ChatTemplateError(Exception):
    """The template cannot be compiled, or refuses or fails on these messages; says what it said."""


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
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as one prompt, the assistant's turn opened at its end.

        Raises:
            ChatTemplateError: the template refuses these messages (`raise_exception`), fails on them, reaches for what
                the sandbox forbids, or produces more than `MAX_RENDERED_CHARS` characters.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        parts: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                **self._variables, messages=turns, tools=None, documents=None, add_generation_prompt=True
            ):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the rendered prompt has more than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: any error of its own is about these messages
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(parts)


_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def chat_template_source(files: Mapping[str, bytes]) -> str | None:
    """The template in a model's files: chat_template.jinja, else chat_template.json, else tokenizer_config.json.

    Of several named templates it is the one called "default", or the only one.

    Raises:
        ChatTemplateError: the named templates are not a list of objects with a name and a template.
    """
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = _load_object(files, name).get("chat_template")
        if isinstance(found, list):
            try:
                named = {entry["name"]: entry["template"] for entry in found}
            except (TypeError, KeyError) as error:
                raise ChatTemplateError(f"{name}: an entry of chat_template has no name or no template") from error
            found = next(iter(named.values())) if len(named) == 1 else named.get("default")
        if isinstance(found, str):
            return found
    return None


def template_variables(files: Mapping[str, bytes]) -> dict[str, str]:
    """The special tokens a template may name: tokenizer_config.json, in older models also special_tokens_map.json."""
    config = _load_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # newer models' maps are copies at best; transformers ignores them too
        config = {**config, **_load_object(files, "special_tokens_map.json")}
    variables = {}
    for name in _TOKEN_VARIABLES:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            variables[name] = content
    return variables


def _load_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold a JSON object, not {type(content).__name__}")
    return content
