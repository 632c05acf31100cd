"""Kinds of values of the load generator's flags, besides those of `chairlift.service.flag_kinds`."""

import re
from collections.abc import Sequence
from math import inf
from typing import TypeVar

from chairlift.service.flag_kinds import notation, number, path
from loadgen.errors import OptionError
from loadgen.measure.goodput import SLO_METRICS

_Value = TypeVar("_Value")

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _duration_s(text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|min|m|h|)", text.strip())
    if match is None:
        raise ValueError
    return float(match[1]) * _UNITS_S[match[2]]


def _above_zero_s(text: str) -> float:
    seconds = _duration_s(text)
    if seconds == 0:
        raise ValueError
    return seconds


def _window_s(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    if not colon:
        raise ValueError
    return _duration_s(start) if start else 0.0, _duration_s(end) if end else inf


def _slo(text: str) -> tuple[str, float]:
    metric, _, limit_ms = text.partition(":")
    if metric not in SLO_METRICS:
        raise ValueError
    return metric, POSITIVE.value_of(limit_ms)


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError
    return key, value


def _class_mix(text: str) -> dict[str, float]:
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if not name or name in mix:
            raise ValueError
        mix[name] = number(0).value_of(weight)
    return mix


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(number(above=0, below=100).value_of(part) for part in text.split(","))


def by_name(flag: str, pairs: Sequence[tuple[str, _Value]]) -> dict[str, _Value]:
    """Returns the values of a repeated flag by their names.

    Raises: OptionError: a name has two values; the last one would win unseen.
    """
    values: dict[str, _Value] = {}
    for name, value in pairs:
        if values.setdefault(name, value) != value:
            raise OptionError(f"{flag} gives {name} both {values[name]} and {value}; give one of them")
    return values


FILE = path("FILE")
FOLDER = path("DIR")
POSITIVE = number(above=0)
SHARE = number(0, 1, metavar="SHARE")
DURATION = notation(_duration_s, "a duration such as 90, 500ms, 5s, 2m or 1h", "DURATION")
"""Seconds; a number without a unit is seconds."""
ABOVE_ZERO = notation(_above_zero_s, "a duration above 0 such as 90, 500ms, 5s, 2m or 1h", "DURATION")
"""The same."""
WINDOW = notation(_window_s, "a window such as 600:1200, 10m:20m or 10m:", "FROM:TO")
"""Start and end in seconds; without an end it is inf."""
SLO = notation(_slo, f"METRIC:MS with one of {', '.join(SLO_METRICS)} and a limit above 0", "METRIC:MS")
"""A metric and its limit in milliseconds."""
TAG = notation(_tag, "KEY=VALUE", "KEY=VALUE")
CLASS_MIX = notation(_class_mix, "CLASS=WEIGHT,..., each class once, no weight below 0", "CLASS=WEIGHT,...")
"""Weights of service classes by name."""
PERCENTILES = notation(_percentiles, "numbers above 0 and below 100, separated by commas", "P,P,...")
