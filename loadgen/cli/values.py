"""What the values of flags look like: durations, shares, targets for latency. Each raises what argparse shows."""

import argparse
import math
import re

from loadgen.measure.goodput import SLO_METRICS

_UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not finite")
    return value


def positive(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """A number of at least 0."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not within 0 and 1")
    return value


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def duration_s(text: str) -> float:
    """Seconds: a number with or without a unit, as 90, 500ms, 5s, 2m, 1h."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|min|m|h|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90, 500ms, 5s, 2m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]


def slo(text: str) -> tuple[str, float]:
    """A latency target, METRIC:MILLISECONDS."""
    metric, colon, limit = text.partition(":")
    if metric not in SLO_METRICS or not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not METRIC:MS with one of {', '.join(SLO_METRICS)}")
    return metric, positive(limit)


def tag(text: str) -> tuple[str, str]:
    """A label of the results, KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def class_mix(text: str) -> dict[str, float]:
    """Weights of service classes, CLASS=WEIGHT,..."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = part.partition("=")
        if not equals or not name or name in mix:
            raise argparse.ArgumentTypeError(f"{text!r} is not CLASS=WEIGHT,..., each class once")
        mix[name] = not_negative(weight)
    return mix


def percentiles(text: str) -> tuple[float, ...]:
    """Numbers above 0 and below 100, separated by commas."""
    values = tuple(number(part) for part in text.split(","))
    if not all(0 < value < 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: each must be above 0 and below 100")
    return values
