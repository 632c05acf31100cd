"""The chat templates in a model's files and what they may name: found, not compiled."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ADDITIONAL_TEMPLATES = "additional_chat_templates/"
_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SENTENCEPIECE_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_QWEN2_DEFAULTS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
_NO_TEMPLATE = "the model has no chat template; send a prompt instead, as text or token ids"


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """One model's chat templates as text.

    Attributes:
        plain: the template of requests without tools; None: they are refused.
        for_tools: that of requests with tools, most often the same.
        variables: what templates may use besides the messages: bos_token, eos_token, ...
        refusal: why chat prompts are refused; empty: nothing speaks against those for which there is a template.
    """

    plain: str | None = None
    for_tools: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "ChatFiles":
        """Finds the templates: chat_template.jinja and additional_chat_templates/, else chat_template.json, else
        tokenizer_config.json. Templates that are there in a wrong form refuse chat, and nothing else.

        Of named templates it is the one called "default"; with tools the one called "tool_use", if there is one.

        Raises:
            ValueError: a file is not the JSON it should be.
        """
        variables = _token_variables(files)
        try:
            found = _find(files)
        except _MalformedTemplatesError as error:
            return cls(variables=variables).refused(str(error))
        if isinstance(found, str):
            return cls(found, found, variables)
        default = found.get("default")
        chosen = cls(default, found.get("tool_use", default), variables)
        return chosen if chosen.plain or chosen.for_tools else replace(chosen, refusal=_NO_TEMPLATE)

    def refused(self, problem: str) -> "ChatFiles":
        """The same files, of no use for chat because of a problem."""
        refusal = f"the model's chat template cannot be compiled ({problem}); send text or token_ids"
        return replace(self, plain=None, for_tools=None, refusal=refusal)

    @property
    def shows_tools(self) -> bool:
        """Whether prompts have the definitions of tools, as far as the template's text tells."""
        return "tools" in (self.for_tools or "")

    @property
    def shown(self) -> str | None:
        """The template that shows the most: of two that for tools."""
        return self.for_tools or self.plain

    def refusal_of(self, *, with_tools: bool) -> str:
        """Why requests with or without tools are refused; empty: they are not."""
        has_template = (self.for_tools if with_tools else self.plain) is not None
        return "" if has_template else self.refusal or _NO_TEMPLATE


class _MalformedTemplatesError(Exception):
    """Says where, and what is wrong."""


def _find(files: Mapping[str, bytes]) -> str | dict[str, str]:
    """One template, or all by name."""
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
    """The special tokens a template may name: tokenizer_config.json, in older models also special_tokens_map.json."""
    config = load_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # newer models' maps are copies at best; transformers ignores them too
        config = {**config, **load_object(files, "special_tokens_map.json")}
    config = {**_class_defaults(files, config), **config}
    own = [name for name in config if name.endswith("_token") and name not in _TOKEN_VARIABLES]
    named = {name: config.get(name) for name in (*_TOKEN_VARIABLES, *own)}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    variables = {}
    for name, token in named.items():
        content = token.get("content") if isinstance(token, dict) and name not in own else token
        if isinstance(content, str):
            variables[name] = content
    return variables


def _class_defaults(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Mapping[str, str]:
    """The special tokens of the checkpoint's tokenizer class in `transformers`, for those that no file names. It does
    not take byte-level tokenizers for Llama's class, whatever their files say.
    """
    match str(config.get("tokenizer_class")).removesuffix("Fast"):
        case "LlamaTokenizer" if b'"ByteLevel"' not in files.get("tokenizer.json", b""):
            return _SENTENCEPIECE_DEFAULTS
        case "Qwen2Tokenizer":
            return _QWEN2_DEFAULTS
    return {}


def load_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among a model's files; empty if there is no such file.

    Raises:
        ValueError: the file holds no such thing.
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
