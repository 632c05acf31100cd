"""Messages bent at random, made from their descriptors: a field that a proto gains is bent from its first day on.

`bend` changes fields and leaves a message valid as protobuf; `garble` breaks its bytes. Both draw from one `Random`, so
that a seed says it all.
"""

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_BAD_TEXT = "\x01\x02\x01"
"""Stands for bytes that are no UTF-8, which no message takes; `garble` puts them in."""
_BAD_BYTES = b"\xff\xed\xa0"

_SMALL = (0, 1, 2, 3, 8, 9, 20, 21)
_EDGES = (16, 17, 64, 65, 255, 256, 257, 258, 300, 4095, 4096, 4097)
_FLOATS = (
    *(0.0, -0.0, 1.0, 0.5, -1.0, 2.0, -2.0, 2.0001, 100.0, 100.1, -100.0, 10.0, 1e-45, 1e-5, 1e9, -1e9, 3.4e38),
    *(float("nan"), float("inf"), float("-inf")),
)
_WORDS = (
    *(
        "",
        "a",
        "abc",
        "user",
        "assistant",
        "tool",
        "fake",
        "no such model",
        "é☃",
        "雪だるま",
        "\U0001f6a1",
        "\x00",
        "\r\n",
    ),
    *(
        "<|end|>",
        "{{ 7 * 7 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "../../etc/passwd",
        "%s%n",
        "a" * 129,
        "b" * 257,
    ),
    *(
        "{}",
        "[]",
        "null",
        "1",
        "{",
        '"',
        '{"a": 1}',
        '{"type": "object"}',
        '{"type": "integer", "minimum": 3}',
        "[" * 500,
    ),
    *('{"type": "function", "function": {"name": "f"}}', '{"$ref": "#"}', '{"enum": []}', '{"pattern": "(a+)+$"}'),
    *("[a-z]+", "(", "(a|b)*", "a{1000000}", "(?=x)", 'start: "a" | start "b"', 'root ::= "a" root?', "start: start"),
    _BAD_TEXT,
)
_INTEGER_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_MOST_ENTRIES = 400
_MOST_LENGTH = 40_000
_MAX_DEPTH = 6


def bend(rng: random.Random, message: Message) -> None:
    """Sets, clears or fills one field, of the message or of one inside it."""
    _bend(rng, message, 0)


def garble(rng: random.Random, data: bytes) -> bytes:
    """Bytes that may be no message any more: cut, doubled, changed, with fields that nobody knows."""
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: data[: rng.randint(0, len(data))],
        lambda: data + data[rng.randint(0, len(data)) :],
        lambda: rng.randbytes(rng.randint(0, 64)),
        lambda: _with_noise(rng, data),
        lambda: data + _unknown_field(rng),
        lambda: _unknown_field(rng) + data,
        lambda: data + b"\x93\x4e" * 200 + b"\x94\x4e" * 200,  # groups in groups
        lambda: data + b"\xff" * 11,  # a varint without an end
    )
    return rng.choice(kinds)()


def wire(message: Message) -> bytes:
    """The message's bytes, those that are no UTF-8 among them."""
    return message.SerializeToString().replace(_BAD_TEXT.encode(), _BAD_BYTES)


def _bend(rng: random.Random, message: Message, depth: int) -> None:
    field: Any = rng.choice(list(message.DESCRIPTOR.fields))
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _fill(rng, message, field, depth)
    elif is_message:
        inside = getattr(message, field.name)
        inside.SetInParent()
        if depth < _MAX_DEPTH:
            for _ in range(rng.choice((1, 1, 2, 4))):
                _bend(rng, inside, depth + 1)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _fill(rng: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    entries: Any = getattr(message, field.name)
    count = rng.choice((1, 1, 1, 2, 3, 17, rng.randint(0, _MOST_ENTRIES)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        for _ in range(count):
            entries[_scalar(rng, key)] = _scalar(rng, value)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        for _ in range(count):
            entry = entries[rng.randrange(len(entries))] if entries and rng.random() < 0.3 else entries.add()
            for _ in range(rng.choice((0, 1, 2, 3)) if depth < _MAX_DEPTH else 0):
                _bend(rng, entry, depth + 1)
    else:
        entries.extend(_scalar(rng, field) for _ in range(count))


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if kind in _INTEGER_BITS:
        low, high = _INTEGER_BITS[kind]
        value = rng.choice(
            (rng.choice(_SMALL), rng.choice(_SMALL), rng.choice(_EDGES), low, high, rng.randint(low, high))
        )
        return -value if low < 0 and rng.random() < 0.2 and value != low else value
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS) if rng.random() < 0.7 else rng.uniform(-3, 3)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    text = rng.choice(_WORDS)
    if rng.random() < 0.02:
        text = (text or "x") * (_MOST_LENGTH // max(len(text), 1))
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def _with_noise(rng: random.Random, data: bytes) -> bytes:
    noisy = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if noisy:
            noisy[rng.randrange(len(noisy))] = rng.randrange(256)
    return bytes(noisy)


def _unknown_field(rng: random.Random) -> bytes:
    number = rng.choice((15, 99, 500, 2**29 - 1))
    wire_type, content = rng.choice(
        ((0, b"\x05"), (1, b"12345678"), (2, b"\x03abc"), (5, b"1234"), (2, b"\x7f"), (6, b""), (4, b""))
    )
    return _varint(number << 3 | wire_type) + content


def _varint(value: int) -> bytes:
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])
