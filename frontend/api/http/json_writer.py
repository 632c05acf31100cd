"""Serializes values to JSON in pieces, so that a large one can be interrupted between two of them."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

_encode_raw = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_ENTRIES = 128
_FEW_ENTRIES = 8  # objects, such as the log-probabilities of a token: 0.5 ms with 20 alternatives
_CHARS = 1 << 16
_SMALL_CHARS = 256
_BYTES = 1 << 20


def encoded(value: Any) -> str:
    """Returns the JSON of a small value.

    The three characters of Unicode that end a line are escaped, as JSON escapes the others: many clients split
    server-sent events at them (httpx's `iter_lines`, say), in the middle of an event.
    """
    text = _encode_raw(value)
    if text.isascii():
        return text
    return text.replace("\x85", r"\u0085").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")


def json_pieces(value: Any, depth: int = 5) -> Iterator[str]:
    """Yields the JSON of any value. An iterable other than a dict or a string is written as a list.

    Args:
        depth: levels that are split; the fifth is that of choices[].logprobs.top_logprobs.
    """
    if isinstance(value, str):
        if len(value) <= _CHARS:
            yield encoded(value)
            return
        yield '"'
        for start in range(0, len(value), _CHARS):
            yield encoded(value[start : start + _CHARS])[1:-1]
        yield '"'
    elif isinstance(value, dict):
        if depth <= 1:
            yield encoded(value)
            return
        yield "{"
        for position, (name, member) in enumerate(value.items()):
            yield f"{',' * bool(position)}{encoded(name)}:"
            yield from json_pieces(member, depth - 1)
        yield "}"
    elif isinstance(value, Iterable):
        yield "["
        yield from _entries(iter(value), depth - 1)
        yield "]"
    else:
        yield encoded(value)


def _entries(entries: Iterator[Any], depth: int) -> Iterator[str]:
    comma, most = "", _FEW_ENTRIES
    while batch := list(islice(entries, most)):
        are_small = all(map(_is_small, batch))
        most = _ENTRIES if are_small else _FEW_ENTRIES
        if depth <= 1 or are_small:
            yield comma + encoded(batch)[1:-1]
            comma = ","
            continue
        for entry in batch:
            yield comma
            yield from json_pieces(entry, depth)
            comma = ","


def _is_small(entry: Any) -> bool:
    return len(entry) <= _SMALL_CHARS if isinstance(entry, str) else not isinstance(entry, Iterable)


def chunks(pieces: Iterable[str]) -> Iterator[bytes | None]:
    """Joins pieces to chunks of about 1 MiB; yields None after each piece that does not complete a chunk."""
    parts: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        parts.append(piece.encode())
        num_bytes += len(parts[-1])
        if num_bytes < _BYTES:
            yield None
            continue
        yield b"".join(parts)
        parts, num_bytes = [], 0
    yield b"".join(parts)
