"""Describes formats of tool calls with marks around each argument."""

import re
from dataclasses import dataclass

MOST_IN_KEY = 1000


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """Marks of one format.

    Attributes:
        openings: marks that open a call.
        closings: marks that end a call; behind one of them, the last one may follow.
        header: pattern of a call from its opening mark to its first argument or its end; its group is the name.
        key, key_end: around an argument's name.
        not_in_key: characters that an argument's name cannot contain.
        value, value_end: around its value. `value` is empty if the value follows `key_end`.
        line_break: what belongs to the marks at both ends of a value, if it is there. In a format with line breaks, an
            unclosed value ends before all closings, and before a line with the key of another argument of the tool.
        written_start, written_end: a call before and after its arguments, as rules write it; `{name}` is the name.
        written_key: an argument before its value, as rules write it; `{key}` is its name.
    """

    openings: frozenset[str]
    closings: tuple[str, ...]
    header: re.Pattern[str]
    key: str
    key_end: str
    value: str
    value_end: str
    written_start: str
    written_key: str
    written_end: str
    line_break: str = ""
    not_in_key: str = ""

    def can_mark(self, key: str) -> bool:
        """Returns whether an argument's name is read as it is written between its marks."""
        is_whole = self.key_end not in key and not any(char in key for char in self.not_in_key)
        return is_whole and key == key.strip() and len(key) < MOST_IN_KEY

    @property
    def texts(self) -> frozenset[str]:
        """All marks."""
        marks = {*self.openings, *self.closings, self.key, self.key_end, self.value, self.value_end}
        # A mark such as ">" is also other text: it can't be a special token.
        return frozenset(mark for mark in marks if len(mark) > 1)

    @property
    def next_key(self) -> str:
        """What may end an unclosed value: the key of another argument on its own line."""
        return self.line_break + self.key

    @property
    def value_ends(self) -> frozenset[str]:
        """What ends a value, with `next_key`, which ends only some."""
        if not self.line_break:
            return frozenset({self.value_end})
        breaks = ("", self.line_break)
        unclosed = {before + between.join(self.closings) for before in breaks for between in breaks}
        return frozenset({self.value_end, self.line_break + self.value_end, self.next_key, *unclosed})
