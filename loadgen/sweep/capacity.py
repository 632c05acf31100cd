"""Capacity: the highest load at which requests meet their limits, read from the load levels of a sweep.

Pure. An INVALID load level proves nothing. Attainment can only fall as the load rises; where measured load levels
say otherwise it is noise, and they are averaged until they do not (isotonic regression by pooling adjacent violators,
Ayer et al. 1955).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from loadgen.sweep.load_level import UNITS, Axis, LoadLevel
from loadgen.sweep.rates import four_digits

TARGETS = (0.9, 0.99)
_SAME = 1e-12
_RULE_OF_THREE = 3  # of n requests that are all good, 95 % sure is a share of 1 - 3 / n


class Answer(NamedTuple):
    """The highest load at which a share of all requests keeps every limit.

    Attributes:
        target: the share.
        load: the highest load level that does; None if none does.
        limit: the lowest load level above it that does not, or is INVALID; None if none was run.
        proven: `limit` was measured and does not.
    """

    target: float
    load: float | None
    limit: float | None
    proven: bool


def settled(load_levels: Sequence[LoadLevel]) -> list[LoadLevel]:
    """One load level for each load that was run, the last that counts if one does; by ascending load."""
    chosen: dict[float, LoadLevel] = {}
    for load_level in load_levels:
        if load_level.counts or load_level.load not in chosen or not chosen[load_level.load].counts:
            chosen[load_level.load] = load_level
    return [chosen[load] for load in sorted(chosen)]


def answer(load_levels: Sequence[LoadLevel], target: float) -> Answer:
    """What load levels say of a target."""
    load_levels = settled(load_levels)
    fitted = list(
        zip(
            (load_level.load for load_level in load_levels if load_level.counts),
            monotone_attainment(load_levels),
            strict=True,
        )
    )
    load = max((at for at, share in fitted if share >= target - _SAME), default=None)
    failed = [at for at, share in fitted if share < target - _SAME]
    hidden = [
        load_level.load
        for load_level in load_levels
        if not load_level.counts and (load is None or load_level.load > load)
    ]
    limit = min([*failed, *hidden], default=None)
    return Answer(target, load, limit, limit in failed)


def monotone_attainment(load_levels: Sequence[LoadLevel]) -> list[float]:
    """Attainment of load levels in ascending order, averaged (by requests) where it would rise with the load."""
    pools: list[tuple[int, int, int]] = []  # good, offered, load levels
    for load_level in load_levels:
        if not load_level.counts:
            continue
        pools.append((load_level.good, load_level.offered, 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((last[0] + before[0], last[1] + before[1], last[2] + before[2]))
    return [good / offered for good, offered, number in pools for _ in range(number)]


def next_probe(load_levels: Sequence[LoadLevel], target: float, precision: float, axis: Axis) -> float | None:
    """The load to run next: between the highest that keeps a target and the lowest that does not.

    Args:
        load_levels: what was run.
        target: share of requests.
        precision: a gap of this share of the load is small enough.
        axis: of concurrency only whole numbers can be run.
    Returns: None where it is known well enough, or the end lies above all load levels.
    """
    known = answer(load_levels, target)
    if known.limit is None or (known.load is not None and known.limit <= known.load * (1 + precision)):
        return None
    load = known.limit / 2 if known.load is None else math.sqrt(known.load * known.limit)
    load = float(round(load)) if axis == "concurrency" else four_digits(load)
    return None if load <= 0 or any(load_level.load == load for load_level in load_levels) else load


def answer_text(one: Answer, load_levels: Sequence[LoadLevel], axis: Axis, limits: str) -> str:
    """An answer as a sentence; `limits` is what good requests keep, such as "TTFT 500 ms, TPOT 50 ms"."""
    unit, head = UNITS[axis], f"{100 * one.target:g} % of requests keep {limits}"
    load_levels = settled(load_levels)
    by_load = {load_level.load: load_level for load_level in load_levels}
    if one.load is None:
        lowest = next((load_level for load_level in load_levels if load_level.counts), None)
        if lowest is None:
            return f"{head}: not known, no load level is valid"
        return f"{head}: at no load level; {100 * lowest.attainment:.1f} % at {lowest.load:g} {unit}, the lowest"
    text = f"{head} up to {one.load:g} {unit} ({100 * by_load[one.load].attainment:.1f} %)"
    if one.limit is None:
        text += ", the highest load level: run higher ones to find the end"
    elif one.proven:
        text += f"; at {one.limit:g}, {100 * by_load[one.limit].attainment:.1f} % do"
    else:
        text += f"; {one.limit:g} proves nothing, it is {by_load[one.limit].level}: run it again"
    offered, needed = by_load[one.load].offered, math.ceil(round(_RULE_OF_THREE / (1 - one.target), 6))
    return text if offered >= needed else f"{text}. Of {offered} requests that may be chance: {needed} are needed"
