"""Parses lists of loads: `1:64:x1.5`, `1:8:+1`, `1,2,4`."""

import math
from itertools import pairwise

from loadgen.errors import OptionError

_MAX_LEVELS = 100
_FORMS = "1,2,4 or FROM:TO:xFACTOR (1:64:x1.5) or FROM:TO:+STEP (1:8:+1)"


def ladder(text: str, flag: str, *, whole: bool = False) -> tuple[float, ...]:
    """The loads of a sweep, ascending. A range ends with its last step that is not above TO.

    Args:
        text: see above.
        flag: it was given to, for messages.
        whole: only whole numbers (of requests at once); steps of a factor are rounded, and what repeats is left out.
    Returns: rates to four digits.
    Raises: OptionError: names the flag, the part and what is allowed.
    """
    steps = _range(text, flag) if ":" in text else tuple(_number(part, text, flag) for part in text.split(","))
    if whole:
        if ":x" in text:
            steps = tuple(dict.fromkeys(float(round(step)) for step in steps))
        for step in steps:
            if step < 1 or step != int(step):
                raise OptionError(f"{flag} {text}: {step:g} is not a whole number of requests at once")
    else:
        steps = tuple(four_digits(step) for step in steps)
    for low, high in pairwise(steps):
        if low >= high:
            raise OptionError(f"{flag} {text}: {high:g} does not rise above {low:g}")
    return steps


def four_digits(value: float) -> float:
    """Rounded, so that a rate can be named and run again."""
    return float(f"{value:.4g}")


def _range(text: str, flag: str) -> tuple[float, ...]:
    parts = text.split(":")
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        raise OptionError(f"{flag} {text}: must look like {_FORMS}")
    low, high = (_number(part, text, flag) for part in parts[:2])
    kind, step = parts[2][0], _number(parts[2][1:], text, flag)
    if low > high:
        raise OptionError(f"{flag} {text}: {low:g} is above {high:g}")
    if kind == "x" and step <= 1:
        raise OptionError(f"{flag} {text}: a factor of {step:g} never gets to {high:g}; it must be above 1")
    room = math.log(high / low) / math.log(step) if kind == "x" else (high - low) / step
    number = math.floor(room + 1e-9) + 1
    if number > _MAX_LEVELS:
        raise OptionError(f"{flag} {text}: makes {number} load levels, {_MAX_LEVELS} at most")
    return tuple(low * step**load_level if kind == "x" else low + step * load_level for load_level in range(number))


def _number(part: str, text: str, flag: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise OptionError(f"{flag} {text}: {part!r} is not a number; write {_FORMS}") from None
    if not (value > 0 and math.isfinite(value)):
        raise OptionError(f"{flag} {text}: {part} must be above 0 and finite")
    return value
