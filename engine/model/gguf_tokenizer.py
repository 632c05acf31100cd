"""Makes the files of a Hugging Face tokenizer from the metadata of a GGUF file.

`tokenizer.ggml.model` is "gpt2" for byte-level BPE, or "llama" or "gemma4" for SentencePiece. What a tokenizer.json
has and the metadata do not say is that of the original checkpoints, so that token ids are theirs.
"""

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from engine.model.gguf_file import GgufHeader
from engine.model.gguf_pre_tokenizers import PRE_TOKENIZERS
from engine.model.gguf_sentencepiece import (
    CONTROL,
    SPACE,
    TOKENS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    merges_by_score,
    sentencepiece_parts,
    spelled,
)

_MODEL = "tokenizer.ggml.model"
_SENTENCEPIECE = ("llama", "gemma4")
_PRE = "tokenizer.ggml.pre"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_TEMPLATE = "tokenizer.chat_template"

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
        "<|end_of_text|>", "<end_of_utterance>", "</s>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "<eos>",
        "_<EOT>", "[EOT]", "[EOS]", "<|observation|>", "<turn|>", "<|tool_response>",
    )
)  # fmt: skip
"""Tokens that end an answer wherever they are in a vocabulary, as in llama.cpp, and the one behind GLM-4's calls of
tools, which its files do not name. Early converters gave some,
such as Phi-3's "<|end|>", the type of users' tokens; of that type "</s>" is a tag of HTML, in Gemma's vocabulary."""

_END_OF_HARMONY = frozenset(("<|return|>", "<|call|>"))
"""Those of vocabularies for gpt-oss."""

_NO_ID = 2**32 - 1
"""-1 as writers of other programs have it, for a token that a vocabulary lacks."""

_DEFAULT_IDS = {"bos": 1, "unknown": 0}
"""Of SentencePiece, for files without the keys, as in llama.cpp."""

_NO_STRIP = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Special tokens of Phi-3 that leave white space behind them alone."""

Json = dict[str, Any]


def check_tokenizer(header: GgufHeader) -> None:
    """Checks that the tokenizer is of a supported kind.

    Raises: CheckpointError: it is not; names its kind.
    """
    fields = header.metadata
    model = fields.raw(_MODEL)
    if model in _SENTENCEPIECE:
        return
    if model != "gpt2":
        raise fields.error(
            _MODEL,
            f"is {model!r}, supported are 'gpt2' (byte-level BPE), 'llama' and 'gemma4' (SentencePiece); serve the "
            "original checkpoint in safetensors",
        )
    pre = fields.raw(_PRE, "absent")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise fields.error(
            _PRE, f"is {pre!r}, supported are {', '.join(PRE_TOKENIZERS)}; serve the original checkpoint in safetensors"
        )


def end_token_ids(header: GgufHeader) -> list[int]:
    """Returns the ids that end an answer: those that keys name, and special tokens with the usual texts.

    Raises: CheckpointError: an id or the vocabulary is malformed.
    """
    ids = {token_id for key in _END_KEYS if (token_id := _named_id(header, key)) is not None}
    if TOKENS in header.metadata:
        tokens = header.strings(TOKENS)
        kinds = zip(tokens, _types(header, tokens), strict=True)
        ends = {
            token: index
            for index, (token, kind) in enumerate(kinds)
            if token in _END_TEXTS and (kind == CONTROL or (kind == USER_DEFINED and token != "</s>"))
        }
        if ends.keys() >= _END_OF_HARMONY:  # "<|end|>" ends a message of an answer, not the answer
            ends.pop("<|end|>", None)
        ids |= {*ends.values()}
    return sorted(ids)


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Returns tokenizer.json, tokenizer_config.json and, for defaults of sampling, generation_config.json.

    Raises: CheckpointError: the kind is not supported, or tokens, types, merges or scores do not fit each other.
    """
    check_tokenizer(header)
    fields = header.metadata
    is_sentencepiece = fields.raw(_MODEL) in _SENTENCEPIECE
    tokens = header.strings(TOKENS)
    types = _types(header, tokens)
    if is_sentencepiece:
        tokens = [spelled(token, kind) for token, kind in zip(tokens, types, strict=True)]
    vocabulary = _vocabulary(header, tokens, types)
    special = _special(header, tokens, _DEFAULT_IDS if is_sentencepiece else {})
    names = {name: tokens[token_id] for name, token_id in special.items() if token_id is not None}
    if is_sentencepiece:
        unknown = names.get("unk_token")
        has_merges = fields.raw(_MODEL) == "gemma4"
        merges = list(_merges(header, vocabulary)) if has_merges else merges_by_score(header, vocabulary, types)
        parts = sentencepiece_parts(header, vocabulary, merges, unknown if unknown in vocabulary else None)
        adds_bos = True
    else:
        parts = _byte_level_parts(header, vocabulary)
        adds_bos = PRE_TOKENIZERS[fields.raw(_PRE)].adds_bos
    tokenizer: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(header, tokens, types, is_sentencepiece=is_sentencepiece),
        "post_processor": _post_processor(header, tokens, special, adds_bos=adds_bos),
        **parts,
    }
    config: Json = dict(names)
    if templates := _templates(header):
        config["chat_template"] = templates
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    keys = {name: f"general.sampling.{key}" for name, key in _SAMPLING.items()}
    values = {name: fields.raw(key, None) for name, key in keys.items()}
    sampling = {name: value for name, value in values.items() if isinstance(value, int | float) and isfinite(value)}
    if sampling:
        files["generation_config.json"] = sampling
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}


def _vocabulary(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, int]:
    """Returns the ids of tokens that are used. Empty ones, which some files have, are not."""
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token and kind != UNUSED and vocabulary.setdefault(token, index) != index:
            raise header.metadata.error(TOKENS, f"has {token[:100]!r} twice, at {vocabulary[token]} and {index}")
    return vocabulary


def _special(header: GgufHeader, tokens: list[str], defaults: dict[str, int]) -> dict[str, int | None]:
    """Returns the ids of special tokens by their names in tokenizer_config.json."""
    special: dict[str, int | None] = dict.fromkeys(_SPECIAL)
    for name, key in _SPECIAL.items():
        default = defaults.get(key)
        token_id = _named_id(header, key)
        if token_id is not None and token_id >= len(tokens):
            if key == "padding":  # nothing is padded
                continue
            raise header.metadata.error(
                f"tokenizer.ggml.{key}_token_id", f"is {token_id}, {TOKENS} has {len(tokens)} tokens"
            )
        if token_id is None and default is not None and default < len(tokens):
            token_id = default
        special[name] = token_id
    return special


def _byte_level_parts(header: GgufHeader, vocabulary: dict[str, int]) -> Json:
    """Returns normalizer, pre-tokenizer, decoder and model of byte-level BPE."""
    pre = PRE_TOKENIZERS[header.metadata.raw(_PRE)]
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.words,
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


def _named_id(header: GgufHeader, key: str) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    is_named = header.metadata.raw(name, _NO_ID) != _NO_ID
    return header.metadata.integer(name, minimum=0) if is_named else None


def _types(header: GgufHeader, tokens: list[str]) -> list[int]:
    types = header.integers(_TYPES)
    if len(types) != len(tokens):
        raise header.metadata.error(_TYPES, f"has {len(types)} entries, {TOKENS} has {len(tokens)}")
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


def _added_tokens(header: GgufHeader, tokens: list[str], types: list[int], *, is_sentencepiece: bool) -> list[Json]:
    """Returns the tokens that are found in a text as a whole: control ones, which are special, and those of users.

    Phi-3's take the white space behind them, see `_NO_STRIP`.
    """
    special = (CONTROL, UNKNOWN) if is_sentencepiece else (CONTROL,)
    strips = is_sentencepiece and header.metadata.raw("general.architecture", None) == "phi3"
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in _NO_STRIP,
            "normalized": False,
            "special": kind in special,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if token
        and (kind in special or (kind == USER_DEFINED and not (is_sentencepiece and token == SPACE * len(token))))
    ]


def _post_processor(
    header: GgufHeader, tokens: list[str], special: dict[str, int | None], *, adds_bos: bool
) -> Json | None:
    """Returns what adds bos and eos tokens to a prompt; None: nothing does.

    adds_bos: whether bos is added unless the file says something else.
    """
    fields = header.metadata
    adds = {
        "bos_token": fields.flag("tokenizer.ggml.add_bos_token", adds_bos),
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
