"""Why requests failed. Texts of errors that differ only in numbers are one cause: a server that names the length of
every prompt it refuses would otherwise have as many causes as prompts.

Pure.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadgen.record import ABSENT, RunData, Status

TIMEOUT = "timeout"
CONNECTION = "connection"
_ANY = "N"
_NUMBER = re.compile(rf"\b(?:\d+(?:[.,]\d+)*|{_ANY})\b")
_CODE = re.compile(r"(HTTP \d{3}|[A-Z_]{4,})\b")
_EXCEPTION = re.compile(r"\w+Error: ")
_ALIKE_UP_TO = 120  # texts may have been cut where a longer number moved their end


class Cause(NamedTuple):
    """One reason of failures, or of refusals.

    Attributes:
        text: what the server or the network said; numbers that differ as their range.
        num_requests: that ended so.
        code: the gRPC status ("INVALID_ARGUMENT"), "HTTP 400", TIMEOUT, CONNECTION; "" for none of them.
    """

    text: str
    num_requests: int
    code: str


def without_numbers(text: str) -> str:
    """The text of a cause, whatever the numbers; a code stays."""
    code = _CODE.match(text)
    kept = code.end() if code else 0
    return text[:kept] + _NUMBER.sub(_ANY, text[kept:])


def causes_of(run: RunData) -> list[Cause]:
    """Why requests failed, the most frequent cause first."""
    return _causes(run, (Status.ERROR, Status.TIMEOUT))


def refusals_of(run: RunData) -> list[Cause]:
    """Why requests were refused for their targets, which is no failure; the most frequent cause first."""
    return _causes(run, (Status.REFUSED,))


def _causes(run: RunData, statuses: Sequence[Status]) -> list[Cause]:
    chosen = np.isin(run.requests["status"], statuses) & (run.requests["error"] != ABSENT)
    numbers, counts = np.unique(run.requests["error"][chosen], return_counts=True)
    timed_out = set(run.requests["error"][run.requests["status"] == Status.TIMEOUT].tolist())
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        text = run.errors[number]
        code = TIMEOUT if number in timed_out else code_of(text)
        alike.setdefault((code, without_numbers(text)[:_ALIKE_UP_TO]), []).append((text, count))
    found = [
        Cause(_in_one([text for text, _ in same]), sum(count for _, count in same), code)
        for (code, _), same in alike.items()
    ]
    return sorted(found, key=lambda cause: -cause.num_requests)


def code_of(text: str) -> str:
    """What kind of error a text tells of: see Cause; TIMEOUT is not in texts."""
    if code := _CODE.match(text):
        return code[1]
    return CONNECTION if _EXCEPTION.match(text) else ""


def _in_one(texts: Sequence[str]) -> str:
    """The first of texts that are alike, with ranges in the place of numbers that differ."""
    pieces, numbers = _NUMBER.split(texts[0]), [_NUMBER.findall(text) for text in texts]
    ranges = [_range(values) for values in zip(*numbers, strict=False)]
    return "".join(
        piece + filled for piece, filled in zip(pieces, [*ranges, *[""] * (len(pieces) - len(ranges))], strict=True)
    )


def _range(values: Sequence[str]) -> str:
    known = set(values) - {_ANY}
    if len(known) == 1:
        return known.pop()
    return _ANY if _ANY in values else f"{min(known, key=_size)} to {max(known, key=_size)}"


def _size(number: str) -> tuple[float, str]:
    try:
        return float(number.replace(",", "")), number
    except ValueError:  # an address or a version
        return float("inf"), number
