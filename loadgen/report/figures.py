"""Text of figures: as many digits as are needed to distinguish two runs."""

import math


def number(value: float) -> str:
    """Three digits or all before the point, thousands apart; "-" for NaN."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:,.{digits}f}"


def milliseconds(value_ms: float) -> str:
    """One digit after the point below 100 ms, two below 10; no unit."""
    if math.isnan(value_ms):
        return "-"
    digits = 2 if abs(value_ms) < 10 else 1 if abs(value_ms) < 1000 else 0
    return f"{value_ms:,.{digits}f}"


def duration(value_ms: float) -> str:
    """A time with its own unit, as on an axis or a label."""
    if math.isnan(value_ms):
        return "-"
    if abs(value_ms) < 1000:
        return f"{value_ms:.3g} ms"
    seconds = value_ms / 1000
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 60:.3g} min"


def share(value: float) -> str:
    """Percent, in four digits; 100 only if it is all."""
    if math.isnan(value):
        return "-"
    shown = 100 * value
    return f"{min(shown, 99.99) if value < 1 else shown:.4g} %"


def percent(value: float, digits: int) -> str:
    """Percent with this many digits after the point, without a sign; 0 only if it is none, 100 only if it is all."""
    least = 10.0**-digits
    shown = 100 * value
    return f"{min(max(shown, least), 100 - least) if 0 < value < 1 else shown:.{digits}f}"
