"""Arrival schedules: when each request is due, as absolute offsets, before anything is sent.

Pure: seeded numbers in, times out. It knows neither prompts nor sockets. A schedule is fixed in advance so that a slow
server cannot slow its own load down (open loop), and latency can be counted from the time a request was due.
"""

import numpy as np
from numpy.typing import NDArray


def constant(rate: float, count: int) -> NDArray[np.float64]:
    """`count` arrivals, one every 1/rate seconds from 0.

    Args:
        rate: requests per second, > 0.
        count: arrivals, >= 0.
    Returns: [count] float64, seconds from the start, ascending.
    Raises: ValueError: a rate or count out of range (names it).
    """
    _check(rate, count)
    return np.arange(count, dtype=np.float64) / rate


def gamma(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> NDArray[np.float64]:
    """Arrivals with gamma-distributed gaps: a Poisson process at burstiness 1, burstier below, smoother above.

    Args:
        rate: mean requests per second, > 0.
        count: arrivals, >= 0.
        burstiness: shape of the gamma distribution, > 0; the gaps' coefficient of variation is burstiness ** -0.5.
        seed: of the gaps.
    Returns: [count] float64, seconds from the start, ascending; the first arrival is one gap after the start.
    Raises: ValueError: a value out of range (names it).
    """
    _check(rate, count)
    if not burstiness > 0:
        raise ValueError(f"burstiness is {burstiness}, must be above 0")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    return np.cumsum(gaps)


def _check(rate: float, count: int) -> None:
    if not (rate > 0 and np.isfinite(rate)):
        raise ValueError(f"rate is {rate} requests per second, must be above 0 and finite")
    if count < 0:
        raise ValueError(f"count is {count}, must not be negative")
