"""Describes formats of tool calls with marks around each argument."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """Marks of one format.

    Attributes:
        opening, closing: around a call.
        header: pattern of a call from its opening mark to its first argument or its end; its group is the name.
        key, key_end: around an argument's name.
        value, value_end: around its value.
        written_start, written_end: a call before and after its arguments, as rules write it; `{name}` is the name.
        written_key: an argument before its value, as rules write it; `{key}` is its name.
    """

    opening: str
    closing: str
    header: re.Pattern[str]
    key: str
    key_end: str
    value: str
    value_end: str
    written_start: str
    written_key: str
    written_end: str

    @property
    def texts(self) -> frozenset[str]:
        """All marks."""
        return frozenset({self.opening, self.closing, self.key, self.key_end, self.value, self.value_end})
