"""Finds which token the tokenizer of a folder calls `eos_token`.

A start asks twice, and tokenizer.json has up to 34 MB, which take a second to parse. So it is read only if the files
beside it name the token without its id, and once.
"""

import functools
import os
from pathlib import Path
from typing import Any

from engine.model.checkpoint_file import MAX_TOKENIZER_BYTES, exists, open_regular, read_json

Json = dict[str, Any]


def named_end_token_id(folder: Path) -> int | None:
    """Returns the id of the token.

    Returns: None if no token is called so, or if an entry is malformed, which `tokenizer_json.complete` reports.
    Raises: CheckpointError: a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not exists(path):
        return None
    config = _object(folder / "tokenizer_config.json")
    declared = config.get("added_tokens_decoder")
    if declared is None:  # older checkpoints, and those of transformers 5
        config = {**config, **_object(folder / "special_tokens_map.json")}
    named = config.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    for key, entry in declared.items() if isinstance(declared, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and key.isdecimal() and len(key) < 10:
            return int(key)
    with open_regular(path) as file:
        return _id_of(path, os.fstat(file.fileno()).st_mtime_ns, text)


def _object(path: Path) -> Json:
    value = read_json(path) if exists(path) else {}
    return value if isinstance(value, dict) else {}


@functools.lru_cache(maxsize=1)
def _id_of(path: Path, _time: int, text: str) -> int | None:
    """Returns the id of a token in tokenizer.json, whose time is that of its last change."""
    tokenizer = read_json(path, MAX_TOKENIZER_BYTES)
    if not isinstance(tokenizer, dict):
        return None
    entries, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            return _id_or_none(entry.get("id"))
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram
        return next((i for i, pair in enumerate(vocabulary) if isinstance(pair, list) and pair[:1] == [text]), None)
    return _id_or_none(vocabulary.get(text)) if isinstance(vocabulary, dict) else None


def _id_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
