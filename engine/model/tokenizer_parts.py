"""Parts of tokenizer.json with which the `tokenizers` library, which only frontends have, ends its process or takes
without bound: found by their numbers.
"""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import CheckpointError

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MAX_GROWTH = 1000
"""How many times longer normalizers may make a text. Replacing a space by a mark of three bytes is the usual."""

_MAX_STRIP = 1000
_TRIE_LENGTH_BYTES = 4


def check_parts(path: Path, tokenizer: dict[str, Any]) -> None:
    """Checks normalizers, pre-tokenizers, post-processors and decoders.

    Args:
        path: of tokenizer.json, for errors.
        tokenizer: its content.

    Raises:
        CheckpointError: a part is one that no frontend could use.
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
                case {"type": "Strip", "start": int(start), "stop": int(stop)} if not (
                    0 <= start <= _MAX_STRIP and 0 <= stop <= _MAX_STRIP
                ):
                    _refuse(path, section, f"Strip has start {start} and stop {stop}, served are 0 to {_MAX_STRIP}")
                case {"type": "TemplateProcessing"}:
                    _check_template(path, part)
    if growth > _MAX_GROWTH:
        _refuse(path, "normalizer", f"may make a text {growth:.3g} times longer, served are {_MAX_GROWTH}")


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """A part and, of a sequence, all in it; the reader of the file has bounded how deep they are."""
    if isinstance(node, dict):
        yield node
        for members in node.values():
            if isinstance(members, list):
                for member in members:
                    yield from _parts(member)


def _check_charsmap(path: Path, text: Any) -> None:
    """The library allocates what the first four bytes say."""
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        data = b""
    length = int.from_bytes(data[:_TRIE_LENGTH_BYTES], "little")
    if len(data) < _TRIE_LENGTH_BYTES or length % 4 or length > len(data) - _TRIE_LENGTH_BYTES:
        _refuse(path, "normalizer", f"precompiled_charsmap names a table of {length} bytes, has {len(data)} in all")


def _check_template(path: Path, part: dict[str, Any]) -> None:
    """The library looks each special token up when it encodes, and takes for granted that it is there."""
    known = part.get("special_tokens")
    for side in ("single", "pair"):
        for piece in part.get(side) or []:
            if isinstance(piece, dict) and isinstance(special := piece.get("SpecialToken"), dict):
                name = special.get("id")
                if not isinstance(known, dict) or name not in known:
                    _refuse(path, "post_processor", f"{side} has the special token {name!r}, special_tokens has it not")


def _growth(part: dict[str, Any]) -> float:
    content = part.get("content", part.get("prepend"))
    pattern = part.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    num_replaced = len(replaced) if isinstance(replaced, str) and replaced else 1
    return max(1.0, len(content) / num_replaced) if isinstance(content, str) else 1.0


def _refuse(path: Path, section: str, problem: str) -> NoReturn:
    raise CheckpointError(f"{path}: {section}: {problem}")
