"""Makes the files of a Hugging Face tokenizer from the metadata of a GGUF file.

Only byte-level BPE is converted (`tokenizer.ggml.model` "gpt2"). How a text is split into words is not in the file:
`tokenizer.ggml.pre` names it, and llama.cpp has a table (llama-vocab.cpp). Here each name has the parts of the
tokenizer.json that llama.cpp's name stands for, so that token ids are those of the original checkpoint.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from engine.model.gguf_file import GgufHeader

_MODEL = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_TEMPLATE = "tokenizer.chat_template"

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names of special tokens in tokenizer_config.json and in keys such as tokenizer.ggml.bos_token_id."""

_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Fields of generation_config.json and the ends of keys such as general.sampling.temp."""

_END_KEYS = ("eos", "eot", "eom")
_END_TEXTS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
        "<|end_of_text|>", "<end_of_utterance>", "</s>",
    )
)  # fmt: skip
"""Control tokens that end an answer wherever they are in a vocabulary, as in llama.cpp."""

Json = dict[str, Any]

_BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DIGITS = {"three": r"\p{N}{1,3}", "one": r"\p{N}"}


def _split(digits: str) -> Json:
    """Returns the pre-tokenizer of tiktoken's cl100k_base, with so many digits in a word."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + _DIGITS[digits]
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [words, _BYTE_LEVEL]}


@dataclass(frozen=True, slots=True)
class _Pre:
    """What a value of tokenizer.ggml.pre stands for.

    Attributes:
        words: the pre-tokenizer.
        normalizer: None: texts stay as they are.
        ignores_merges: whether a word that is a token is not merged from its bytes.
        adds_bos: whether prompts begin with the bos token, unless the file says something else.
    """

    words: Json
    normalizer: Json | None = None
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = _Pre(_split("three"), ignores_merges=True, adds_bos=True)
_GPT2_WORDS = {**_BYTE_LEVEL, "use_regex": True}
_PRES = {
    "gpt-2": _Pre(_GPT2_WORDS),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Pre(_split("one"), normalizer={"type": "NFC"}),
    "smollm": _Pre({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2_WORDS]}),
}


def check_tokenizer(header: GgufHeader) -> None:
    """Checks that the tokenizer is of a supported kind.

    Raises: CheckpointError: it is not; names its kind.
    """
    fields = header.metadata
    if (model := fields.raw(_MODEL)) != "gpt2":
        raise fields.error(
            _MODEL, f"is {model!r}, supported is 'gpt2' (byte-level BPE); serve the original checkpoint in safetensors"
        )
    pre = fields.raw(_PRE, "absent")
    if not isinstance(pre, str) or pre not in _PRES:
        raise fields.error(
            _PRE, f"is {pre!r}, supported are {', '.join(_PRES)}; serve the original checkpoint in safetensors"
        )


def end_token_ids(header: GgufHeader) -> list[int]:
    """Returns the ids that end an answer: those that keys name, and control tokens with the usual texts.

    Raises: CheckpointError: an id or the vocabulary is malformed.
    """
    ids = {token_id for key in _END_KEYS if (token_id := _named_id(header, key)) is not None}
    if _TOKENS in header.metadata:
        tokens = header.strings(_TOKENS)
        kinds = enumerate(_types(header, tokens))
        ids |= {index for index, kind in kinds if kind == _CONTROL and tokens[index] in _END_TEXTS}
    return sorted(ids)


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Returns tokenizer.json, tokenizer_config.json and, for defaults of sampling, generation_config.json.

    Raises: CheckpointError: the kind is not supported, or tokens, types or merges do not fit each other.
    """
    check_tokenizer(header)
    fields = header.metadata
    pre = _PRES[fields.raw(_PRE)]
    tokens = header.strings(_TOKENS)
    types = _types(header, tokens)
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if vocabulary.setdefault(token, index) != index:
            raise fields.error(_TOKENS, f"has {token[:100]!r} twice, at {vocabulary[token]} and {index}")
    added = [
        _added_token(tokens[index], index, is_special=kind == _CONTROL)
        for index, kind in enumerate(types)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    special = {name: _named_id(header, key) for name, key in _SPECIAL.items()}
    for name, token_id in special.items():
        if token_id is not None and token_id >= len(tokens):
            raise fields.error(
                f"tokenizer.ggml.{_SPECIAL[name]}_token_id", f"is {token_id}, {_TOKENS} has {len(tokens)} tokens"
            )
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.words,
        "post_processor": _post_processor(header, pre, tokens, special),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignores_merges,
            "vocab": vocabulary,
            "merges": list(_merges(header, vocabulary)),
        },
    }
    config: Json = {name: tokens[token_id] for name, token_id in special.items() if token_id is not None}
    if templates := _templates(header):
        config["chat_template"] = templates
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    keys = {name: f"general.sampling.{key}" for name, key in _SAMPLING.items()}
    values = {name: fields.raw(key, None) for name, key in keys.items()}
    sampling = {name: value for name, value in values.items() if isinstance(value, int | float) and isfinite(value)}
    if sampling:
        files["generation_config.json"] = sampling
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}


def _named_id(header: GgufHeader, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    return header.metadata.integer(name, minimum=0) if name in header.metadata else None


def _types(header: GgufHeader, tokens: list[str]) -> list[int]:
    types = header.integers(_TYPES)
    if len(types) != len(tokens):
        raise header.metadata.error(_TYPES, f"has {len(types)} entries, {_TOKENS} has {len(tokens)}")
    return types


def _merges(header: GgufHeader, vocabulary: dict[str, int]) -> Iterator[list[str]]:
    """Yields pairs of tokens."""
    for index, merge in enumerate(header.strings(_MERGES)):
        pair = merge.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise header.metadata.error(
                _MERGES, f"has {merge[:100]!r} at {index}, expected two tokens whose concatenation is a token"
            )
        yield pair


def _added_token(token: str, index: int, *, is_special: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": is_special}


def _post_processor(header: GgufHeader, pre: _Pre, tokens: list[str], special: dict[str, int | None]) -> Json | None:
    """Returns what adds bos and eos tokens to a prompt; None: nothing does."""
    fields = header.metadata
    adds = {
        "bos_token": fields.flag("tokenizer.ggml.add_bos_token", pre.adds_bos),
        "eos_token": fields.flag("tokenizer.ggml.add_eos_token", False),
    }
    added = {name: index for name, is_added in adds.items() if is_added and (index := special[name]) is not None}
    if not added:
        return None
    around = {name: [{"SpecialToken": {"id": tokens[index], "type_id": 0}}] for name, index in added.items()}
    single = [*around.get("bos_token", []), {"Sequence": {"id": "A", "type_id": 0}}, *around.get("eos_token", [])]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            tokens[index]: {"id": tokens[index], "ids": [index], "tokens": [tokens[index]]} for index in added.values()
        },
    }


def _templates(header: GgufHeader) -> str | list[Json] | None:
    """Returns the chat template, or the named ones."""
    fields = header.metadata
    named = {
        key.removeprefix(f"{_TEMPLATE}."): fields.raw(key) for key in fields.names if key.startswith(f"{_TEMPLATE}.")
    }
    if _TEMPLATE in fields:
        named = {"default": fields.raw(_TEMPLATE), **named}
    for name, template in named.items():
        if not isinstance(template, str):
            key = _TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}"
            raise fields.error(key, f"is {template!r}, expected a template")
    if list(named) == ["default"]:
        return str(named["default"])
    return [{"name": name, "template": template} for name, template in named.items()] or None
