"""Finds the chat templates and their variables in a model's files. Does not compile them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.service.engine_protocol import TEMPLATE_FOLDER

ADDITIONAL_TEMPLATES = f"{TEMPLATE_FOLDER}/"
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTENCEPIECE_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_QWEN2_DEFAULTS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_NO_TEMPLATE = (
    "the model has no chat template; send a prompt instead, as text or token ids, or give the engine one by "
    "--chat-template"
)


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """One model's chat templates as text.

    Attributes:
        plain: template for requests without tools; None if these are refused.
        for_tools: template for requests with tools, usually the same.
        variables: template variables besides the messages: bos_token, eos_token, ...
        refusal: why chat prompts without a template are refused; empty if both have one.
    """

    plain: str | None = None
    for_tools: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ChatFiles":
        """Finds the templates.

        They are in chat_template.jinja and additional_chat_templates/, or else in chat_template.json, or else in
        tokenizer_config.json. Of named templates, "default" is used, and with tools "tool_use" if it exists. Malformed
        templates disable only chat prompts.

        Raises:
            ValueError: a file is not valid JSON.
        """
        variables = _token_variables(files)
        try:
            found = _find(files)
        except _MalformedTemplatesError as error:
            return cls(variables=variables).refused(str(error))
        if isinstance(found, str):
            return cls(found, found, variables)
        default = found.get("default")
        return cls(default, found.get("tool_use", default), variables, _missing_default(found))

    def with_template(self, template: str) -> "ChatFiles":
        """Returns a copy with another template, with and without tools."""
        return replace(self, plain=template, for_tools=template, refusal="")

    def refused(self, problem: str) -> "ChatFiles":
        """Returns a copy that refuses chat prompts because of a problem."""
        refusal = f"the model's chat template cannot be compiled ({problem}); send text or token_ids"
        return replace(self, plain=None, for_tools=None, refusal=refusal)

    @property
    def shows_tools(self) -> bool:
        """Whether the template inserts the definitions of tools, judged by its text."""
        return "tools" in (self.for_tools or "")

    @property
    def shown(self) -> str | None:
        """The template for tools if it exists, otherwise the plain one."""
        return self.for_tools or self.plain

    def refusal_of(self, *, with_tools: bool) -> str:
        """Returns why requests with or without tools are refused; empty if they are not."""
        has_template = (self.for_tools if with_tools else self.plain) is not None
        return "" if has_template else self.refusal or _NO_TEMPLATE


def _missing_default(named: Mapping[str, str]) -> str:
    if not named:
        return _NO_TEMPLATE
    if "default" in named:
        return ""
    return (
        f"the model's chat templates are named {', '.join(map(repr, sorted(named)))}, and none 'default', which chat "
        "without tools requires ('tool_use' suffices with tools); send a prompt instead, as text or token ids"
    )


class _MalformedTemplatesError(Exception):
    """Templates in a wrong format; the message names the file and the problem."""


def _find(files: Mapping[str, bytes]) -> str | dict[str, str]:
    """Returns the only template, or all templates by name."""
    named = {
        name.removeprefix(ADDITIONAL_TEMPLATES).removesuffix(".jinja"): _text(name, data)
        for name, data in files.items()
        if name.startswith(ADDITIONAL_TEMPLATES)
    }
    if "chat_template.jinja" in files:
        named = {"default": _text("chat_template.jinja", files["chat_template.jinja"]), **named}
    if named:
        return named
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = load_object(files, name).get("chat_template")
        if isinstance(found, list):
            try:
                found = {entry["name"]: entry["template"] for entry in found}
            except (TypeError, KeyError) as error:
                raise _MalformedTemplatesError(
                    f"{name}: an entry of chat_template has no name or no template"
                ) from error
        if isinstance(found, dict) and not all(isinstance(text, str) for item in found.items() for text in item):
            raise _MalformedTemplatesError(f"{name}: an entry of chat_template is not text")
        if isinstance(found, str | dict):
            return found
    return {}


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _MalformedTemplatesError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error


def _token_variables(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns special tokens by name, from tokenizer_config.json and, in older models, special_tokens_map.json."""
    config = load_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # transformers ignores the map of newer models, too
        config = {**config, **load_object(files, "special_tokens_map.json")}
    config = {**_class_defaults(files, config), **config}
    own = [name for name in config if name.endswith("_token") and name not in _TOKEN_VARIABLES]
    named = {name: config.get(name) for name in (*_TOKEN_VARIABLES, *own)}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    variables = {}
    for name, token in named.items():
        if isinstance(token, dict) and (name not in own or "__type" in token):
            token = token.get("content")
        if isinstance(token, str):
            variables[name] = token
    return variables


def _class_defaults(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns the default special tokens of the checkpoint's tokenizer class in `transformers`.

    Like `transformers`, ignores Llama's class for byte-level tokenizers.
    """
    match str(config.get("tokenizer_class")).removesuffix("Fast"):
        case "LlamaTokenizer" if b'"ByteLevel"' not in files.get("tokenizer.json", b""):
            return _SENTENCEPIECE_DEFAULTS
        case "Qwen2Tokenizer":
            return _QWEN2_DEFAULTS
    return {}


def load_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Returns the JSON object in one of a model's files; empty without the file.

    Raises:
        ValueError: the file does not contain a JSON object.
    """
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold a JSON object, not {type(content).__name__}")
    return content
