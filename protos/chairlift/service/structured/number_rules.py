"""Rules for numbers of a JSON Schema: what llguidance computes exactly, and in bounded time. Pure.

The library keeps bounds and constants as floats, and integers of a range in 64 bits. It rounds what does not fit, and
recurses without end from -2**63 on. It allows an exclusive bound itself if the other bound has the same integer part.
It has no limit for the automaton of `multipleOf`.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from chairlift.service.structured.schema_walk import Schema, Subschema

MAX_REMAINDERS = 50_000
"""Compiling `multipleOf` of a prime takes 0.3 s and 30 MB up to here, 2.7 s and 170 MB at six times as much."""

_INWARDS = {
    "minimum": math.inf,
    "exclusiveMinimum": math.inf,
    "maximum": -math.inf,
    "exclusiveMaximum": -math.inf,
}
_FIRST_INEXACT = 2**53
_LARGEST = 2**63 - 1024
"""The largest float within 64 bits."""

_NEAR_ZERO = 1e-18
"""A bound beside 0. The library writes all its digits, and parses them as 64 bits."""


def narrow_bounds(_root: Schema, subschema: Subschema) -> None:
    """Moves large bounds inwards to floats within 64 bits.

    Raises: ConstraintError: nothing within 64 bits is in the bounds.
    """
    schema = subschema.schema
    for keyword, inwards in _INWARDS.items():
        bound = schema.get(keyword)
        if not _is_number(bound) or not abs(bound) >= _FIRST_INEXACT:  # or not a number
            continue
        narrowed = _narrowed(bound, inwards, is_exclusive=_is_exclusive(schema, keyword))
        if abs(narrowed) > _LARGEST:
            raise subschema.refusal([keyword], f"{bound}, beyond 64 bits")
        schema[keyword] = int(narrowed)


def exclude_bounds(_root: Schema, subschema: Subschema) -> None:
    """Moves exclusive bounds at whole numbers inwards by less than a decimal can show."""
    schema = subschema.schema
    if schema.get("type") == "integer":
        return
    for keyword, inwards in _INWARDS.items():
        bound = schema.get(keyword)
        if _is_number(bound) and abs(bound) < 2**52 and bound % 1 == 0 and _is_exclusive(schema, keyword):
            schema[keyword] = math.nextafter(bound, inwards) if bound else math.copysign(_NEAR_ZERO, inwards)


def refuse_inexact_values(_root: Schema, subschema: Subschema) -> None:
    """Refuses integers that the library would round.

    Raises: ConstraintError: see above.
    """
    for keyword in ("const", "enum"):
        for value in _integers(subschema.schema.get(keyword)):
            if abs(value) > _LARGEST or int(float(value)) != value:
                raise subschema.refusal([keyword], f"of {value}, which would be rounded")


def num_remainders(schema: Schema) -> int:
    """Returns the remainders that the library distinguishes for `multipleOf`: powers of ten cost nothing."""
    step = schema.get("multipleOf")
    if not _is_number(step) or not math.isfinite(step):
        return 1
    digits = Decimal(repr(step)).normalize().as_tuple().digits
    return int("".join(map(str, digits))) or 1


def _narrowed(bound: float, inwards: float, *, is_exclusive: bool) -> float:
    bound = max(min(bound, 2**63), -_LARGEST) if inwards > 0 else min(max(bound, -(2**63)), _LARGEST)
    narrowed = float(bound)
    if is_exclusive or (narrowed < bound if inwards > 0 else narrowed > bound):
        narrowed = math.nextafter(narrowed, inwards)
    return narrowed


def _is_exclusive(schema: Schema, keyword: str) -> bool:
    """Returns whether a bound is exclusive; in draft 4 by a flag beside it."""
    return keyword.startswith("exclusive") or schema.get(f"exclusive{keyword.capitalize()}") is True


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integers(value: Any) -> Iterator[int]:
    """Yields all integers in a JSON value."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | dict):
            waiting.extend(part.values() if isinstance(part, dict) else part)
        elif isinstance(part, int):
            yield part
