"""Rejects parts of tokenizer.json that would crash the `tokenizers` library of frontends, or take unbounded memory."""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import CheckpointError

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MAX_GROWTH = 1000
"""Largest factor by which normalizers may lengthen a text. A common one replaces a space by a character of 3 bytes."""

_MAX_STRIP = 1000
_TRIE_LENGTH_BYTES = 4


def check_parts(path: Path, tokenizer: dict[str, Any]) -> None:
    """Checks normalizers, pre-tokenizers, post-processors and decoders.

    Args:
        path: path of tokenizer.json, for errors.
        tokenizer: its content.

    Raises:
        CheckpointError: frontends could not use a part.
    """
    growth = 1.0
    for section in _SECTIONS:
        for part in _parts(tokenizer.get(section)):
            match part:
                case {"type": "Precompiled"}:
                    _check_charsmap(path, part.get("precompiled_charsmap"))
                case {"type": "Replace" | "Prepend"}:
                    growth *= _growth(part)
                case {"type": "FixedLength", "length": int(length)} if length < 1:
                    _refuse(path, section, f"FixedLength has the length {length}, expected >= 1")
                case {"type": "Strip", "stop": int(stop)} if section == "decoder" and stop > 0:
                    _refuse(path, section, f"Strip has stop {stop}: the library fails for tokens that are shorter")
                case {"type": "Strip", "start": int(start), "stop": int(stop)} if not (
                    0 <= start <= _MAX_STRIP and 0 <= stop <= _MAX_STRIP
                ):
                    _refuse(path, section, f"Strip has start {start} and stop {stop}, supported are 0 to {_MAX_STRIP}")
                case {"type": "TemplateProcessing"}:
                    _check_template(path, part)
    if growth > _MAX_GROWTH:
        _refuse(path, "normalizer", f"may make a text {growth:.3g} times longer, supported are {_MAX_GROWTH}")


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Yields a part and all nested parts; the depth was bounded when the file was read."""
    if isinstance(node, dict):
        yield node
        for members in node.values():
            if isinstance(members, list):
                for member in members:
                    yield from _parts(member)


def _check_charsmap(path: Path, text: Any) -> None:
    """Checks the table size in the first four bytes, which the library allocates without a check."""
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        data = b""
    length = int.from_bytes(data[:_TRIE_LENGTH_BYTES], "little")
    if len(data) < _TRIE_LENGTH_BYTES or length % 4 or length > len(data) - _TRIE_LENGTH_BYTES:
        _refuse(path, "normalizer", f"precompiled_charsmap declares a table of {length} bytes, has {len(data)} in all")


def _check_template(path: Path, part: dict[str, Any]) -> None:
    """Checks that all special tokens of a template are defined; the library crashes otherwise."""
    known = part.get("special_tokens")
    for side in ("single", "pair"):
        pieces = part.get(side) or []
        if not isinstance(pieces, list):
            _refuse(path, "post_processor", f"{side} is {pieces!r}, expected a list")
        for piece in pieces:
            if isinstance(piece, dict) and isinstance(special := piece.get("SpecialToken"), dict):
                name = special.get("id")
                if not isinstance(known, dict) or not isinstance(name, str) or name not in known:
                    problem = f"{side} has the special token {name!r}, which special_tokens does not define"
                    _refuse(path, "post_processor", problem)


def _growth(part: dict[str, Any]) -> float:
    content = part.get("content", part.get("prepend"))
    pattern = part.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    num_replaced = len(replaced) if isinstance(replaced, str) and replaced else 1
    return max(1.0, len(content) / num_replaced) if isinstance(content, str) else 1.0


def _refuse(path: Path, section: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{path}: {section}: {problem}")
