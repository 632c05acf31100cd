"""A row of a trace, and the interface of trace formats.

A format is recognized by the names in a file's first line, never by the order of its columns. Its parser sees one row
at a time and returns a Row or the reason to leave the row out, or raises MalformedRowError.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

MAX_TOKENS = 2**31 - 1


class MalformedRowError(Exception):
    """A malformed row.

    Attributes:
        field: what is wrong, one word: rows that are dropped are counted by it.
        detail: the whole complaint.
    """

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field
        self.detail = detail


class Row(NamedTuple):
    """One request: arrival on the clock of its file in seconds, lengths in tokens, and what else the file contains.

    `blocks` are the ids of its prompt's blocks of `block_tokens` tokens; with `block_tokens` 0 the file does not say
    what prompts share. `session` is the conversation, None without one.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: int = 0
    session: int | str | None = None


class LeftOut(NamedTuple):
    """A sound row that is no request to run, and why."""

    reason: str


Record = Mapping[str, Any]
Parser = Callable[[Record], Row | LeftOut]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        sort: put rows in order of arrival instead of refusing a clock that runs backwards.
        skip_malformed: leave malformed rows out and count them instead of refusing the file.
        model: only rows of this model, where a format names it; "" for all.
        seed: for formats that are models of traffic and have to be sampled.
        window_s: from and to on the file's clock, all that is going to be used: a format that is sampled stops there.
        timed: rows must say when they arrive.
    """

    sort: bool = False
    skip_malformed: bool = False
    model: str = ""
    seed: int = 0
    window_s: tuple[float, float] = (0.0, math.inf)
    timed: bool = True


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A format with one row per request.

    Attributes:
        name: for `--trace-format`.
        description: one line, for `--help`.
        kind: lines of comma-separated values under a header, or JSON objects.
        required: names that every such file has; the format with the most of them wins.
        new_parser: a parser for one file.
        counts_from_first: whether arrivals count from the first request; of a file that is sorted, from its earliest.
    """

    name: str
    description: str
    kind: Literal["csv", "jsonl"]
    required: frozenset[str]
    new_parser: Callable[[ReadOptions], Parser]
    counts_from_first: bool = False


def whole_number(record: Record, name: str, *, low: int, high: int = 2**63 - 1) -> int:
    """Returns a whole number from JSON or text.

    Raises: MalformedRowError: it is missing, something else, or out of range.
    """
    value = record.get(name)
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and value.isascii() and len(value) < 20:
        value = int(value)
    if type(value) is not int:
        raise MalformedRowError(name, f"{name} is {_shown(value)}, not a whole number")
    if not low <= value <= high:
        raise MalformedRowError(name, f"{name} is {value}, must be {low} to {high}")
    return value


def tokens(record: Record, name: str) -> int:
    """A length of at least one token. Raises: MalformedRowError."""
    return whole_number(record, name, low=1, high=MAX_TOKENS)


def real_number(record: Record, name: str) -> float:
    """Returns a finite number from JSON or text.

    Raises: MalformedRowError: it is missing, something else, or not finite.
    """
    value = record.get(name)
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool) and "_" not in str(value):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if math.isfinite(number):
        return number
    raise MalformedRowError(name, f"{name} is {_shown(value)}, not a number")


def block_ids(record: Record, name: str, input_tokens: int, block_tokens: int) -> list[int]:
    """Returns the ids of a prompt's blocks: as many as cover its tokens.

    Raises: MalformedRowError: not a list of 64-bit whole numbers, or of another length.
    """
    ids = record.get(name)
    if not isinstance(ids, list) or not all(type(block) is int and -(2**63) <= block < 2**63 for block in ids):
        raise MalformedRowError(name, f"{name} is {_shown(ids)}, not a list of whole numbers")
    expected = -(-input_tokens // block_tokens)
    if len(ids) != expected:
        raise MalformedRowError(
            name, f"{name} has {len(ids)} blocks, {input_tokens} tokens are {expected} blocks of {block_tokens}"
        )
    return ids


def _shown(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
