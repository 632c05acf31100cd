"""Scans a JSON object (RFC 8259) that arrives in pieces, and separates its members' values from its structure.

It buffers only the current member's name or scalar, and one stack entry per open bracket. Unlike the standard, it
accepts unescaped control characters in strings, because models write them.
"""

import enum
import json
import re
from typing import NamedTuple

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR_START = frozenset("-0123456789tfn")
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")


class Part(enum.Enum):
    """Role of a run of characters."""

    STRUCTURE = "structure"  # brackets, names, commas and whitespace of the object itself
    VALUE = "value"  # belongs to the value of the member `key`
    CONTROL = "control"  # like VALUE: one control character in a string
    END = "end"  # the bracket that closes the object
    ERROR = "error"  # the text is not JSON from here on; nothing was consumed


class Run(NamedTuple):
    """A run of characters with one role, up to `end`."""

    part: Part
    end: int


class _Expect(enum.Enum):
    OBJECT = "{"
    KEY_OR_END = "name or }"
    KEY = "name"
    COLON = ":"
    VALUE = "value"
    VALUE_OR_END = "value or ]"
    COMMA_OR_END = ", or closing bracket"


class JsonObjectScanner:
    """Scans one object from its opening bracket on.

    Attributes:
        key: name of the object's current or latest member.
    """

    def __init__(self) -> None:
        self.key = ""
        self._open: list[str] = []  # the closing bracket of each open one, outermost first
        self._expect = _Expect.OBJECT
        self._scalar = ""  # the number or word being read
        self._string: list[str] | None = None  # the string being read; has text only if it is a member's name
        self._is_key = False
        self._escape = ""  # the escape sequence so far, from its backslash on

    def scan(self, text: str, start: int) -> Run:
        """Returns the next run of characters; `start` is less than the text's length."""
        if self._string is not None:
            return self._in_string(self._string, text, start)
        char = text[start]
        if self._scalar:
            if char not in _SPACE and char not in ",]}":
                self._scalar += char
                return Run(Part.VALUE, start + 1)
            if _SCALAR.fullmatch(self._scalar) is None:
                return Run(Part.ERROR, start)
            self._scalar = ""
            self._expect = _Expect.COMMA_OR_END
        if char in _SPACE:
            return self._inner_or_structure(len(self._open), start + 1)
        return self._token(char, start)

    def _token(self, char: str, start: int) -> Run:
        expect, depth = self._expect, len(self._open)
        if char == '"' and expect in (_Expect.KEY, _Expect.KEY_OR_END):
            self._string, self._is_key = [], True
        elif char == ":" and expect is _Expect.COLON:
            self._expect = _Expect.VALUE
        elif char == "," and expect is _Expect.COMMA_OR_END:
            self._expect = _Expect.KEY if self._open[-1] == "}" else _Expect.VALUE
        elif char in "]}" and depth and self._may_close(char):
            self._open.pop()
            self._expect = _Expect.COMMA_OR_END
            if depth == 1:
                return Run(Part.END, start + 1)
            return Run(Part.VALUE, start + 1)
        elif expect is _Expect.OBJECT and char == "{":
            self._open.append("}")
            self._expect = _Expect.KEY_OR_END
        elif expect in (_Expect.VALUE, _Expect.VALUE_OR_END) and self._begin_value(char):
            return Run(Part.VALUE, start + 1)
        else:
            return Run(Part.ERROR, start)
        return self._inner_or_structure(depth, start + 1)

    @staticmethod
    def _inner_or_structure(depth: int, end: int) -> Run:
        return Run(Part.VALUE if depth > 1 else Part.STRUCTURE, end)

    def _may_close(self, char: str) -> bool:
        may_end = _Expect.KEY_OR_END if char == "}" else _Expect.VALUE_OR_END
        return char == self._open[-1] and self._expect in (may_end, _Expect.COMMA_OR_END)

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._string, self._is_key = [], False
        elif char == "{":
            self._open.append("}")
            self._expect = _Expect.KEY_OR_END
        elif char == "[":
            self._open.append("]")
            self._expect = _Expect.VALUE_OR_END
        elif char in _SCALAR_START:
            self._scalar = char
        else:
            return False
        return True

    def _in_string(self, string: list[str], text: str, start: int) -> Run:
        is_own_key = self._is_key and len(self._open) == 1
        part = Part.STRUCTURE if is_own_key else Part.VALUE
        char = text[start]
        end = start + 1
        if self._escape:
            self._escape += char
            if not _may_be_escape(self._escape):
                return Run(Part.ERROR, start)
            if _is_escape(self._escape):
                char, self._escape = self._escape, ""
                if is_own_key:
                    string.append(char)
        elif char == "\\":
            self._escape = char
        elif char == '"':
            self._end_string(string, is_own_key)
        elif (plain := _PLAIN.match(text, start)) is not None:
            end = plain.end()
            if is_own_key:
                string.append(plain[0])
        elif not is_own_key:
            return Run(Part.CONTROL, end)
        else:
            return Run(Part.ERROR, start)
        return Run(part, end)

    def _end_string(self, string: list[str], is_own_key: bool) -> None:
        self._string = None
        self._expect = _Expect.COLON if self._is_key else _Expect.COMMA_OR_END
        if is_own_key:
            self.key = json.loads(f'"{"".join(string)}"')


def _may_be_escape(text: str) -> bool:
    return text[1] in '"\\/bfnrt' or (text[1] == "u" and _HEX.issuperset(text[2:]))


def _is_escape(text: str) -> bool:
    return len(text) == (6 if text[1] == "u" else 2)
