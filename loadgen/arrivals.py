"""Arrival schedules: when each request is due, as absolute offsets, before anything is sent.

Pure: seeded numbers in, times out. It knows neither prompts nor sockets. A schedule is fixed in advance so that a slow
server cannot slow its own load down (open loop), and latency can be counted from the time a request was due.

Rates that change are made by stretching time: a process of rate 1 is run through the inverse of the rate's integral,
which gives a Poisson process the changing rate exactly (Çinlar, "Introduction to Stochastic Processes", 1975).

Every schedule returns [count] float64, ascending seconds from the start, and raises ValueError for a value out of range
(names it). Common arguments: `count` arrivals, at least 0; `burstiness`, the shape of the gamma distribution of the
gaps, above 0: their coefficient of variation is burstiness ** -0.5; `seed` of everything random.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Step(NamedTuple):
    """A rate in requests per second, above 0, and for how many seconds, above 0."""

    rate: float
    duration_s: float


def at_once(count: int) -> Floats:
    """`count` arrivals at 0: everything is offered and the server takes what it can."""
    _check_count(count)
    return np.zeros(count)


def constant(rate: float, count: int) -> Floats:
    """`count` arrivals, one every 1/rate seconds from 0; the rate is above 0."""
    _check_rate("rate", rate)
    _check_count(count)
    return np.arange(count, dtype=np.float64) / rate


def gamma(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> Floats:
    """Arrivals with gamma-distributed gaps: a Poisson process at burstiness 1, burstier below, smoother above.

    The mean rate is above 0; the first arrival is one gap after the start.
    """
    _check_rate("rate", rate)
    return _at_rate_one(count, burstiness, seed) / rate


def on_off(rate: float, count: int, *, on_s: float, off_s: float, seed: int = 0) -> Floats:
    """Bursts and silences: a two-state Markov-modulated Poisson process that is silent in one state.

    Stretches of both kinds last exponentially long. `gamma` with the same variation of the gaps makes clumps of
    requests at almost one moment instead; here a burst has a rate and a length, as real on/off traffic has.

    Args:
        rate: mean requests per second over both states, > 0; inside bursts it is rate * (on_s + off_s) / on_s.
        on_s, off_s: mean seconds of a burst and of a silence, > 0. The first burst begins at 0.
    """
    _check_rate("rate", rate)
    _check_duration("on_s", on_s)
    _check_duration("off_s", off_s)
    gaps_seed, on_seed, off_seed = np.random.SeedSequence(seed).spawn(3)
    rate_on = rate * (on_s + off_s) / on_s
    busy_s = _at_rate_one(count, 1.0, gaps_seed) / rate_on  # on a clock that stands still during silences
    total_s = float(busy_s[-1]) if count else 0.0
    ends = np.zeros(0)
    on = np.random.default_rng(on_seed)
    while len(ends) == 0 or ends[-1] < total_s:
        ends = np.cumsum(np.append(np.diff(ends, prepend=0.0), on.exponential(on_s, 64 + len(ends))))
    silences = np.cumsum(np.random.default_rng(off_seed).exponential(off_s, len(ends)))
    silent_before = np.concatenate(([0.0], silences))[np.searchsorted(ends, busy_s)]
    return busy_s + silent_before


def linear_ramp(start_rate: float, end_rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> Floats:
    """Arrivals whose rate changes evenly in time, from start to end over the whole schedule.

    Args:
        start_rate, end_rate: requests per second at the first and the last moment, >= 0, not both 0.
        count: arrivals, >= 0; the ramp lasts 2 * count / (start_rate + end_rate) seconds.
    """
    for name, rate in (("start rate", start_rate), ("end rate", end_rate)):
        if not (rate >= 0 and np.isfinite(rate)):
            raise ValueError(f"{name} is {rate} requests per second, must not be negative and must be finite")
    _check_rate("mean of start and end rate", (start_rate + end_rate) / 2)
    due = _at_rate_one(count, burstiness, seed)
    duration_s = 2 * count / (start_rate + end_rate)
    in_ramp = np.minimum(due, count)
    # the root of start * t + (end - start) / (2 * duration) * t**2 = due, in the form that stays exact for equal rates
    root = np.sqrt(np.maximum(start_rate**2 + 2 * (end_rate - start_rate) / max(duration_s, 1e-300) * in_ramp, 0.0))
    times = 2 * in_ramp / np.maximum(start_rate + root, 1e-300)
    return _after_the_end(times, due, count, duration_s, end_rate or start_rate)


def exponential_ramp(
    start_rate: float, end_rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0
) -> Floats:
    """Arrivals whose rate is multiplied evenly in time, from start to end over the whole schedule.

    Args:
        start_rate, end_rate: requests per second at the first and the last moment, > 0.
        count: arrivals, >= 0; the ramp lasts count * ln(end / start) / (end - start) seconds.
    """
    _check_rate("start rate", start_rate)
    _check_rate("end rate", end_rate)
    if start_rate == end_rate:
        return gamma(start_rate, count, burstiness=burstiness, seed=seed)
    due = _at_rate_one(count, burstiness, seed)
    growth = np.log(end_rate / start_rate)
    duration_s = float(count * growth / (end_rate - start_rate))
    in_ramp = np.minimum(due, count)
    times = np.log1p(in_ramp / max(count, 1) * (end_rate - start_rate) / start_rate) / growth * duration_s
    return _after_the_end(times, due, count, duration_s, end_rate)


def stepped(steps: Sequence[Step], count: int, *, burstiness: float = 1.0, seed: int = 0) -> Floats:
    """Arrivals whose rate goes from step to step, of at least one; the last step's rate continues."""
    if not steps:
        raise ValueError("there are no steps, must be at least 1")
    for step in steps:
        _check_rate("rate of a step", step.rate)
        _check_duration("duration of a step", step.duration_s)
    due = _at_rate_one(count, burstiness, seed)
    ends_s = np.concatenate(([0.0], np.cumsum([step.duration_s for step in steps])))
    arrivals = np.concatenate(([0.0], np.cumsum([step.rate * step.duration_s for step in steps])))
    return _after_the_end(np.interp(due, arrivals, ends_s), due, arrivals[-1], ends_s[-1], steps[-1].rate)


def _at_rate_one(count: int, burstiness: float, seed: int | np.random.SeedSequence) -> Floats:
    _check_count(count)
    if not (burstiness > 0 and np.isfinite(burstiness)):
        raise ValueError(f"burstiness is {burstiness}, must be above 0 and finite")
    return np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1.0 / burstiness, count))


def _after_the_end(times: Floats, due: Floats, expected: float, end_s: float, rate: float) -> Floats:
    """Chance brings some arrivals after the `expected` ones that fill a schedule: they go on at its last rate."""
    return np.where(due > expected, end_s + (due - expected) / rate, times)


def _check_rate(name: str, rate: float) -> None:
    if not (rate > 0 and np.isfinite(rate)):
        raise ValueError(f"{name} is {rate} requests per second, must be above 0 and finite")


def _check_duration(name: str, duration_s: float) -> None:
    if not (duration_s > 0 and np.isfinite(duration_s)):
        raise ValueError(f"{name} is {duration_s} seconds, must be above 0 and finite")


def _check_count(count: int) -> None:
    if count < 0:
        raise ValueError(f"count is {count}, must not be negative")
