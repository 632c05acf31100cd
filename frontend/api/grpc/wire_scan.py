"""Counts the fields of a large protobuf message before it is parsed, and refuses it as soon as one exceeds a limit.

Parsing holds the GIL until it ends, and two bytes can make an object: a request of 8 MiB may have four million. This
scan reads only tags and lengths, in slices.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from chairlift.service.sampling_fields import SAMPLING, STOPPING
from frontend import limits
from frontend.errors import InvalidRequest
from frontend.slices import Sliced

_YIELD_EVERY = 64  # fields
_WINDOW = 1 << 18  # bytes of a list
_CONTINUED = bytes(range(0x80, 0x100))  # bytes that do not end a varint
_FIXED_BYTES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_NO_NUMBERS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_GROUP)

_MOST_ENTRIES = {
    "chairlift.v1.TokenIds.ids": limits.MAX_TOKEN_IDS,
    "chairlift.v1.ChatPrompt.messages": limits.MAX_MESSAGES,
    "chairlift.v1.ChatPrompt.tools_json": limits.MAX_TOOLS,
    "chairlift.v1.ChatMessage.tool_calls": limits.MAX_TOOL_CALLS,
    "chairlift.v1.Choices.texts": limits.MAX_CHOICES,
    **{
        f"chairlift.v1.{message}.{name}": row.rule.max_entries
        for message, table in (("SamplingOptions", SAMPLING), ("StopOptions", STOPPING))
        for name, row in table.items()
        if row.rule.max_entries
    },
}


class MalformedMessageError(Exception):
    """The bytes are not a valid message; the parser reports what is wrong."""


class _Field(NamedTuple):
    name: str
    most_entries: int
    message: "Mapping[int, _Field] | None"  # of its type
    is_number: bool
    is_text: bool
    fixed_bytes: int  # of each number; 0: they are varints


class _Open(NamedTuple):
    """A message being scanned."""

    path: str
    end: int
    fields: Mapping[int, _Field]
    counts: dict[int, int]


def check_counts(data: bytes, kind: Descriptor) -> Sliced[None]:
    """Scans a message.

    Raises:
        InvalidRequest: it has more entries in one field, or fields in all, than a request may have.
        MalformedMessageError: it cannot be parsed.
    """
    num_fields = at = 0
    opened = [_Open("", len(data), _fields(kind), {})]
    while opened:
        path, end, fields, counts = opened[-1]
        if at >= end:
            if at > end:
                raise MalformedMessageError
            opened.pop()
            continue
        num_fields += 1
        if num_fields > limits.MAX_WIRE_FIELDS:
            raise InvalidRequest(f"the request has more than {limits.MAX_WIRE_FIELDS} fields")
        if num_fields % _YIELD_EVERY == 0:
            yield
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        field = fields.get(number)
        num_entries, start = 1, at
        match wire_type:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, start = _varint(data, at)
                at = start + size
                if at > end:
                    raise MalformedMessageError
                if field is not None and field.is_number:
                    num_entries = yield from _num_packed(data, start, at, field.fixed_bytes)
            case 3 | 4:  # a group: the public proto has none
                continue
            case _:
                raise MalformedMessageError
        if field is None:
            continue
        name = f"{path}.{field.name}" if path else field.name
        counts[number] = counts.get(number, 0) + num_entries
        if counts[number] > field.most_entries:
            most = field.most_entries
            message = f"{field.name} has {counts[number]} entries or more, at most {most} are allowed"
            raise InvalidRequest(message, field=name)
        if field.is_text and at - start > limits.MAX_TEXT_BYTES:
            message = f"{field.name} has {at - start} bytes of UTF-8, at most {limits.MAX_TEXT_BYTES} are allowed"
            raise InvalidRequest(message, field=name)
        if wire_type == 2 and field.message is not None:
            opened.append(_Open(name, at, field.message, {}))
            at = start


def _num_packed(data: bytes, start: int, end: int, fixed_bytes: int) -> Sliced[int]:
    if fixed_bytes:
        return (end - start) // fixed_bytes
    num_entries = 0
    for at in range(start, end, _WINDOW):
        num_entries += len(data[at : min(at + _WINDOW, end)].translate(None, _CONTINUED))
        yield
    return num_entries


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedMessageError


@cache
def _fields(kind: Descriptor) -> Mapping[int, _Field]:
    return {field.number: _field(field) for field in kind.fields}


def _field(field: Any) -> _Field:
    return _Field(
        field.name,
        _MOST_ENTRIES.get(field.full_name, limits.MAX_WIRE_FIELDS),
        _fields(field.message_type) if field.message_type is not None else None,
        field.message_type is None and field.type not in _NO_NUMBERS,
        field.type == FieldDescriptor.TYPE_STRING,
        _FIXED_BYTES.get(field.type, 0),
    )
