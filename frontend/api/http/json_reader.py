"""Incremental JSON parser with limits: yields between entries and refuses a body as soon as it exceeds a limit.

Parsers in C hold the GIL until they finish: 200,000 messages in one body stop every stream for seconds. This parser
yields every few entries, and inside long strings and lists. A long list of token ids becomes an array, with an eighth
of the memory and of the time. Values equal those of pydantic's parser.
"""

import re
from array import array
from collections.abc import Collection, Mapping
from typing import Any

import pydantic_core

from frontend.api.http.errors import BodyError
from frontend.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_NUMBER_CHARS, MAX_TEXT_BYTES, MAX_TOKEN_IDS
from frontend.slices import Sliced

_WINDOW = 1 << 15  # of bytes that one call of a library gets to see
_YIELD_EVERY = 16  # values
_FEW_IDS_BYTES = 64

_SPACE = re.compile(rb"[ \t\n\r]*+")
_SHORT_TEXT = re.compile(rb'"([ !#-\[\]-~]{0,64})"')  # without anything that has to be decoded
_SCALAR = re.compile(rb"[a-zA-Z0-9.+\-]++")
_IDS = re.compile(rb"(?:[ \t\n\r]*+[0-9]{1,10}+[ \t\n\r]*+,)++")
# The rest of a text, cut where no escape or pair of escapes is split.
_TEXT = re.compile(
    rb'(?:[^"\\]++|\\["\\/bfnrt]'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})++"
)


def read_json(
    data: bytes, id_lists: Collection[str], most_entries: Mapping[str, int], most_bytes: Mapping[str, int]
) -> Sliced[Any]:
    """Parses a JSON text.

    Args:
        id_lists: members of the outermost object that are lists of token ids, or lists of such lists; long ones become
            arrays.
        most_entries: maximum number of entries, by member of the outermost object.
        most_bytes: maximum length in bytes of a member that is an object or a list.

    Raises:
        BodyError: it is not JSON, or exceeds a limit.
    """
    return _Reader(data, id_lists, most_entries, most_bytes).read()


class _Reader:
    """Parses one text; `_at` is the position of the next JSON token.

    `param` is the outermost object's member that is being read, for errors; `depth` is 1 for its own value.
    """

    def __init__(
        self, data: bytes, id_lists: Collection[str], most_entries: Mapping[str, int], most_bytes: Mapping[str, int]
    ) -> None:
        self._data = data
        self._id_lists = id_lists
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._at = 0
        self._num_values = 0
        self._num_ids = 0

    def read(self) -> Sliced[Any]:
        yield from self._skip_space()
        value = yield from self._value("", 0)
        yield from self._skip_space()
        if self._at < len(self._data):
            raise self._invalid()
        return value

    def _value(self, param: str, depth: int) -> Sliced[Any]:
        self._num_values += 1
        if self._num_values > MAX_JSON_VALUES:
            message = f"the body has more than {MAX_JSON_VALUES} values"
            raise BodyError(400, f"{message}, the last of them in {param}" if param else message, param=param or None)
        if self._num_values % _YIELD_EVERY == 0:
            yield
        match self._data[self._at : self._at + 1]:
            case b'"':
                return (yield from self._text(param))
            case b"{" | b"[" as opening:
                if depth >= MAX_JSON_DEPTH:
                    raise BodyError(
                        400, f"the body's JSON is nested more than {MAX_JSON_DEPTH} levels deep", param=param or None
                    )
                self._at += 1
                return (yield from (self._list if opening == b"[" else self._object)(param, depth))
        return self._scalar()

    def _object(self, param: str, depth: int) -> Sliced[dict[str, Any]]:
        members: dict[str, Any] = {}
        more = not (yield from self._took(b"}"))
        while more:
            if self._data[self._at : self._at + 1] != b'"':
                raise self._invalid()
            name = yield from self._text(param)
            if not (yield from self._took(b":")):
                raise self._invalid()
            start = self._at
            value = members[name] = yield from self._value(param if depth else name[:64], depth + 1)
            if (
                not depth
                and isinstance(value, dict | list)
                and self._at - start > self._most_bytes.get(name, len(self._data))
            ):
                most = self._most_bytes[name]
                raise BodyError(400, f"{name} has {self._at - start} bytes, at most {most} are allowed", param=name)
            self._check_entries(len(members), param, depth)
            more = yield from self._took(b",")
            if not more and not (yield from self._took(b"}")):
                raise self._invalid()
        return members

    def _list(self, param: str, depth: int) -> "Sliced[list[Any] | array[int]]":
        entries: list[Any] | array[int] = []
        if depth <= 2 and param in self._id_lists:
            entries = yield from self._ids(param)
        more = not (yield from self._took(b"]"))
        if not more and entries:
            raise self._invalid()  # behind a comma
        while more:
            entry = yield from self._value(param, depth + 1)
            if isinstance(entries, array) and not _is_id(entry):
                message = f"{param}.{len(entries)} must be a token id, as the entries before it"
                raise BodyError(400, message, param=param)
            entries.append(entry)
            if not isinstance(entries, array):
                self._check_entries(len(entries), param, depth)
            more = yield from self._took(b",")
            if not more and not (yield from self._took(b"]")):
                raise self._invalid()
        return entries

    def _ids(self, param: str) -> "Sliced[list[Any] | array[int]]":
        """Reads a run of token ids but for the last one; short runs stay lists."""
        ids: array[int] = array("I")
        while True:
            run = _IDS.match(self._data, self._at, self._at + _WINDOW)
            if run is None or (not ids and len(run[0]) < _FEW_IDS_BYTES):
                return ids or []
            try:
                ids.extend(self._parsed(b"[" + run[0][:-1] + b"]"))
            except OverflowError:
                raise BodyError(
                    400, f"{param} has an entry above {2**32 - 1}, which is no token id", param=param
                ) from None
            num_new = run[0].count(b",")
            self._num_ids += num_new
            if self._num_ids > MAX_TOKEN_IDS:
                raise BodyError(400, f"{param} has more than {MAX_TOKEN_IDS} token ids", param=param)
            self._at = run.end()
            yield

    def _text(self, param: str) -> Sliced[str]:
        short = _SHORT_TEXT.match(self._data, self._at)
        if short is not None:
            yield from self._skip_space(short.end())
            return short[1].decode("ascii")
        self._at += 1
        pieces: list[str] = []
        num_bytes = 0
        while (piece := _TEXT.match(self._data, self._at, self._at + _WINDOW)) is not None:
            end = piece.end()
            for _ in range(3):  # out of the middle of a character
                end -= self._data[end : end + 1] > b"\x7f" and self._data[end] & 0xC0 == 0x80
            pieces.append(self._parsed(b'"' + self._data[self._at : end] + b'"'))
            self._at = end
            num_bytes += len(pieces[-1].encode())
            if num_bytes > MAX_TEXT_BYTES:
                message = f"has a text of more than {MAX_TEXT_BYTES} bytes of UTF-8"
                raise BodyError(400, f"{param or 'the body'} {message}", param=param or None)
            if len(piece[0]) > _WINDOW // 2:
                yield
        if self._data[self._at : self._at + 1] != b'"':
            raise self._invalid()
        yield from self._skip_space(self._at + 1)
        return "".join(pieces)

    def _scalar(self) -> Any:
        scalar = _SCALAR.match(self._data, self._at, self._at + MAX_NUMBER_CHARS + 1)
        if scalar is None:
            raise self._invalid()
        if len(scalar[0]) > MAX_NUMBER_CHARS:
            raise BodyError(400, f"the body has a number of more than {MAX_NUMBER_CHARS} characters")
        value = self._parsed(scalar[0])
        self._at = scalar.end()
        return value

    def _took(self, sign: bytes) -> Sliced[bool]:
        """Consumes a character and the space around it, if it is next; returns whether it was."""
        yield from self._skip_space()
        if self._data[self._at : self._at + 1] != sign:
            return False
        yield from self._skip_space(self._at + 1)
        return True

    def _skip_space(self, at: int | None = None) -> Sliced[None]:
        if at is not None:
            self._at = at
        while self._data[self._at : self._at + 1] in (b" ", b"\t", b"\n", b"\r"):
            space = _SPACE.match(self._data, self._at, self._at + _WINDOW)
            assert space is not None
            self._at = space.end()
            if len(space[0]) == _WINDOW:
                yield

    def _check_entries(self, number: int, param: str, depth: int) -> None:
        if depth == 1 and number > self._most_entries.get(param, MAX_JSON_VALUES):
            most = self._most_entries[param]
            raise BodyError(400, f"{param} has {number} entries or more, at most {most} are allowed", param=param)

    def _parsed(self, piece: bytes) -> Any:
        try:
            return pydantic_core.from_json(piece, allow_inf_nan=True, cache_strings=False)
        except ValueError:
            raise self._invalid() from None

    def _invalid(self) -> BodyError:
        what = "ends too early" if self._at >= len(self._data) else f"is wrong at byte {self._at}"
        return BodyError(400, f"the body is not valid JSON: it {what}")


def _is_id(entry: Any) -> bool:
    return type(entry) is int and 0 <= entry < 1 << 32
