"""Kinds of values of flags: how a text is parsed, which values are allowed, and how messages and help show them."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SWITCH_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_MAX_LISTED_CHARS = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values.

    Attributes:
        parse: makes a value of a text; raises ValueError or OverflowError.
        is_allowed: whether a value is in range.
        allowed: the range, in words that follow "it must be".
        metavar: how the help shows a value; empty: by the flag's name.
        separator: if not None, the flag may be repeated; the variable's values are separated by this text, or are one
            value if it is empty.
        takes_several: whether a repeated flag also takes several values at once: `--x a b`.
    """

    parse: Callable[[str], Any]
    is_allowed: Callable[[Any], bool]
    allowed: str
    metavar: str = ""
    separator: str | None = None
    takes_several: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether it is `switch()`."""
        return self.parse is _parse_switch

    def value_of(self, text: str) -> Any:
        """Returns the value of a text.

        Raises: ValueError: the text has none, or one out of range.
        """
        try:
            value = self.parse(text)
        except OverflowError as error:
            raise ValueError(str(error)) from error
        if value is not None and not self.is_allowed(value):
            raise ValueError(f"must be {self.allowed}")
        return value


def text(
    allowed: str = "a non-empty text", is_allowed: Callable[[str], bool] = lambda text: bool(text.strip()), *,
    metavar: str = "",
) -> Kind:  # fmt: skip
    """A text; by default any that is not empty."""
    return Kind(str, is_allowed, allowed, metavar)


ANY_TEXT = text("a text", lambda _: True)
"""Any text, also an empty one."""


def choice(values: Sequence[str]) -> Kind:
    """One of a few texts."""
    listed = ", ".join(values)
    metavar = "{" + ",".join(values) + "}"
    shown = metavar if len(metavar) <= _MAX_LISTED_CHARS else ""
    return Kind(str, lambda value: value in values, f"one of {listed}", shown)


def notation(parse: Callable[[str], Any], allowed: str, metavar: str = "") -> Kind:
    """What a parser makes of a text; it raises ValueError for all that is not allowed."""
    return Kind(parse, lambda _: True, allowed, metavar)


def path(metavar: str = "PATH") -> Kind:
    """A path; whether it exists is not checked."""
    return notation(Path, "a path", metavar)


def integer(low: int, high: int | None = None, *, only: Collection[int] = ()) -> Kind:
    """A whole number; a suffix multiplies it: 2k is 2000, 2K is 2048, 4G is 4294967296.

    Args:
        low: smallest value.
        high: largest value; None: any.
        only: the values to choose from, if not all between.
    """
    allowed = f"a whole number between {low} and {high}" if high is not None else f"a whole number, at least {low}"
    if only:
        allowed = f"one of {', '.join(map(str, only))}"
    return Kind(
        _parse_integer,
        lambda value: low <= value and (high is None or value <= high) and (not only or value in only),
        allowed,
        "N",
    )


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, below: float = math.inf,
    metavar: str = "X",
) -> Kind:  # fmt: skip
    """A finite number in a range; `low` and `high` are in it, `above` and `below` are not."""
    allowed = f"a number between {low:g} and {high:g}"
    if math.isinf(low) or math.isinf(high):
        ends = {", at least": low, " above": above, " at most": high, " below": below}
        allowed = "a number" + " and".join(f"{words} {end:g}" for words, end in ends.items() if math.isfinite(end))
    return Kind(
        float,
        lambda value: math.isfinite(value) and low <= value <= high and above < value < below,
        allowed,
        metavar,
    )


def optional(kind: Kind, *words: str) -> Kind:
    """Another kind, or one of the words, which stand for None."""
    return dataclasses.replace(
        kind,
        parse=lambda value: None if value in words else kind.parse(value),
        allowed=f"{kind.allowed}, or {words[0]}",
    )


def switch() -> Kind:
    """On or off: `--x` and `--no-x`, or one of eight words in the variable."""
    return Kind(_parse_switch, lambda value: isinstance(value, bool), f"one of {', '.join(_SWITCH_WORDS)}")


def repeated(kind: Kind, separator: str = ",", *, takes_several: bool = False) -> Kind:
    """A tuple of values: the flag may be repeated, or take several at once; the variable separates them."""
    return dataclasses.replace(kind, separator=separator, takes_several=takes_several)


def _parse_integer(value: str) -> int:
    factor = _SUFFIXES.get(value[-1:])
    return int(value) if factor is None else int(float(value[:-1]) * factor)


def _parse_switch(value: str) -> bool:
    if value.lower() not in _SWITCH_WORDS:
        raise ValueError
    return _SWITCH_WORDS[value.lower()]
