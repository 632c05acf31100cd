"""Completes tokenizer.json as `transformers` does, with tokens that only other files of the checkpoint declare.

A checkpoint may declare tokens only in tokenizer_config.json (`added_tokens_decoder`, `bos_token`,
`extra_special_tokens`, ...), special_tokens_map.json or added_tokens.json. `AutoTokenizer` adds them when it loads the
tokenizer. A program that reads only tokenizer.json splits them into pieces, and shows special tokens as text. Here they
are added to tokenizer.json, so that frontends and grammars do not need the other files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import CheckpointError
from engine.model.tokenizer_parts import check_parts

MAX_TOKEN_ID = 2**24 - 1
"""Bounds the tables of tokens, which have a row for each id up to the largest."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Json = dict[str, Any]


def complete(folder: Path, contents: Mapping[str, Json]) -> Json | None:
    """Returns tokenizer.json with all tokens; None if it has them already.

    Args:
        folder: folder of the files, for errors.
        contents: the JSON objects by file name, including tokenizer.json.

    Raises:
        CheckpointError: the tokenizer has no tokens, too large ids, or settings with which `transformers` produces
            other text.
    """
    config = contents.get("tokenizer_config.json", {})
    path, tokenizer = folder / "tokenizer.json", contents["tokenizer.json"]
    vocabulary = _vocabulary(path, tokenizer)
    _check_config(folder / "tokenizer_config.json", config, tokenizer["model"])
    check_parts(path, tokenizer)
    added = _AddedTokens(path, tokenizer.get("added_tokens") or [], vocabulary)
    if not vocabulary and not added.entries:
        raise CheckpointError(f"{path}: has no tokens: neither model.vocab nor added_tokens names one")
    for file, token, token_id in _declared(folder, contents, added):
        added.add(file, token, token_id)
    if not added.has_changed:
        return None
    return {**tokenizer, "added_tokens": sorted(added.entries.values(), key=lambda entry: entry["id"])}


class _AddedTokens:
    """The entries of `added_tokens` by their text."""

    def __init__(self, path: Path, entries: Any, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self.entries: dict[str, Json] = {}
        self.has_changed = False
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
                _malformed(path, "added_tokens", entry)
            _check_id(path, entry["content"], entry.get("id"))
            self.entries[entry["content"]] = entry

    def add(self, file: Path, token: Json, declared_id: int | None) -> None:
        """Adds a token, or changes the flags of an existing one, like `add_tokens` of the library."""
        content = token["content"]
        before = self.entries.get(content)
        token_id = before["id"] if before is not None else self._vocabulary.get(content, self._next_id())
        if declared_id is not None and declared_id != token_id:
            raise CheckpointError(
                f"{file}: gives {content!r} the id {declared_id}, with this tokenizer.json its id is {token_id}: save "
                "the tokenizer again with save_pretrained"
            )
        entry = {"id": token_id, **{key: token[key] for key in ("content", *_FLAGS)}}
        if before is not None:  # a special token remains special
            entry["special"] = entry["special"] or bool(before.get("special", False))
        if before is None or any(before.get(flag, False) != entry[flag] for flag in _FLAGS):
            self.entries[content] = entry
            self.has_changed = True

    def _next_id(self) -> int:
        return max(len(self._vocabulary), 1 + max((entry["id"] for entry in self.entries.values()), default=-1))


def _vocabulary(path: Path, tokenizer: Json) -> Mapping[str, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        if not all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in vocabulary):
            _malformed(path, "model.vocab", None)
        vocabulary = {pair[0]: index for index, pair in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        raise CheckpointError(f"{path}: has no model.vocab: a tokenizer in the Hugging Face format is required")
    for content, token_id in vocabulary.items():
        _check_id(path, content, token_id)
    return vocabulary


def _check_id(path: Path, content: str, token_id: Any) -> None:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= MAX_TOKEN_ID:
        raise CheckpointError(f"{path}: token {content[:100]!r} has the id {token_id!r}, expected 0 to {MAX_TOKEN_ID}")


def _declared(
    folder: Path, contents: Mapping[str, Json], added: _AddedTokens
) -> Iterator[tuple[Path, Json, int | None]]:
    """Yields the tokens that other files declare: file, flags, id; in the order in which they are added."""
    config_path = folder / "tokenizer_config.json"
    config = contents.get("tokenizer_config.json", {})
    declared: dict[str, Json] = {}
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"]
        if not isinstance(decoder, dict) or not all(key.isdecimal() and len(key) < 10 for key in decoder):
            _malformed(config_path, "added_tokens_decoder", decoder)
        for key in sorted(decoder, key=int):
            token = _token(config_path, "added_tokens_decoder", decoder[key])
            declared[token["content"]] = token
            yield config_path, token, int(key)
    else:  # older checkpoints
        known_extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
        config = {**config, **contents.get("special_tokens_map.json", {})}
        special = {
            token["content"] for token in _named(config_path, {**config, "additional_special_tokens": known_extra})
        }
        path = folder / "added_tokens.json"
        for content, token_id in sorted(contents.get("added_tokens.json", {}).items(), key=lambda item: str(item[1])):
            _check_id(path, content, token_id)
            is_special = content in special
            if content not in added.entries:
                yield path, _with_flags({"content": content, "special": is_special}), token_id
    for token in _named(config_path, config):
        known = declared.get(token["content"]) or added.entries.get(token["content"])
        if known is None:
            yield config_path, token, None
        elif token["is_named"] and not known.get("special", False):
            yield (
                config_path,
                {**{flag: known.get(flag, False) for flag in ("content", *_FLAGS)}, "special": True},
                None,
            )


def _named(path: Path, config: Json) -> list[Json]:
    """Returns the special tokens: first those with a name, such as bos_token, then the others."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    names = [*_NAMED, *(name for name in config if name.endswith("_token") and name not in _NAMED)]
    named = [config.get(name) for name in names]
    if isinstance(extra, dict):
        named, extra = [*named, *extra.values()], []
    if not isinstance(extra, list):
        _malformed(path, "extra_special_tokens", extra)
    return [
        {**_token(path, "a special token", token, special=True), "is_named": is_named}
        for tokens, is_named in ((named, True), (extra, False))
        for token in tokens
        if isinstance(token, str | dict)
    ]


def _token(path: Path, name: str, value: Any, *, special: bool = False) -> Json:
    if isinstance(value, str):
        return _with_flags({"content": value, "special": special})
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        _malformed(path, name, value)
    return _with_flags({**value, "special": bool(value.get("special", False)) or special})


def _with_flags(token: Json) -> Json:
    """Fills in the default flags of the library."""
    flags = {flag: bool(token.get(flag, False)) for flag in _FLAGS}
    return {"content": token["content"], **flags, "normalized": bool(token.get("normalized", not flags["special"]))}


def _check_config(path: Path, config: Json, model: Json) -> None:
    """Rejects settings that change texts in `transformers` and are not supported here."""
    name = "clean_up_tokenization_spaces"
    if model.get("type", "BPE" if "merges" in model else "") == "BPE":  # BPE: only the long name has an effect
        name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    if config.get(name):
        raise CheckpointError(
            f"{path}: {name} is true, supported is false: spaces before punctuation are not removed from answers"
        )
    files = config.get("fast_tokenizer_files")
    if files and files != ["tokenizer.json"]:
        raise CheckpointError(f"{path}: fast_tokenizer_files is {files!r}, only tokenizer.json is read; remove it")


def _malformed(path: Path, name: str, value: Any) -> NoReturn:
    raise CheckpointError(f"{path}: {name} has an invalid entry: {value!r}")
