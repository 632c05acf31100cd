"""How high may the load be while requests keep their limits? Read off the rungs of a sweep.

Pure. An INVALID rung proves nothing. Attainment can only fall as the load rises; where measured rungs say otherwise it
is noise, and they are averaged until they do not (isotonic regression by pooling adjacent violators, Ayer et al. 1955).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from loadgen.sweep.load_level import UNITS, Axis, Rung
from loadgen.sweep.rates import four_digits

TARGETS = (0.9, 0.99)
_SAME = 1e-12


class Answer(NamedTuple):
    """The highest load at which a share of all requests keeps every limit.

    Attributes:
        target: the share.
        load: the highest rung that does; None if none does.
        limit: the lowest rung above it that does not, or is INVALID; None if none was played.
        proven: `limit` was measured and does not.
    """

    target: float
    load: float | None
    limit: float | None
    proven: bool


def settled(rungs: Sequence[Rung]) -> list[Rung]:
    """One rung for each load that was played, the last that counts if one does; by ascending load."""
    chosen: dict[float, Rung] = {}
    for rung in rungs:
        if rung.counts or rung.load not in chosen or not chosen[rung.load].counts:
            chosen[rung.load] = rung
    return [chosen[load] for load in sorted(chosen)]


def answer(rungs: Sequence[Rung], target: float) -> Answer:
    """What rungs say of a target."""
    rungs = settled(rungs)
    fitted = list(zip((rung.load for rung in rungs if rung.counts), monotone_attainment(rungs), strict=True))
    load = max((at for at, share in fitted if share >= target - _SAME), default=None)
    failed = [at for at, share in fitted if share < target - _SAME]
    hidden = [rung.load for rung in rungs if not rung.counts and (load is None or rung.load > load)]
    limit = min([*failed, *hidden], default=None)
    return Answer(target, load, limit, limit in failed)


def monotone_attainment(rungs: Sequence[Rung]) -> list[float]:
    """Attainment of those rungs, by ascending load, that count; averaged (by requests) wherever it rises with it."""
    pools: list[tuple[int, int, int]] = []  # good, offered, rungs
    for rung in rungs:
        if not rung.counts:
            continue
        pools.append((rung.good, rung.offered, 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((last[0] + before[0], last[1] + before[1], last[2] + before[2]))
    return [good / offered for good, offered, number in pools for _ in range(number)]


def next_probe(rungs: Sequence[Rung], target: float, precision: float, axis: Axis) -> float | None:
    """The load to play next: between the highest that keeps a target and the lowest that does not.

    Args:
        rungs: what was played.
        target: share of requests.
        precision: a gap of this share of the load is small enough.
        axis: of concurrency only whole numbers can be played.
    Returns: None where it is known well enough, or the end lies above all rungs.
    """
    known = answer(rungs, target)
    if known.limit is None or (known.load is not None and known.limit <= known.load * (1 + precision)):
        return None
    load = known.limit / 2 if known.load is None else math.sqrt(known.load * known.limit)
    load = float(round(load)) if axis == "concurrency" else four_digits(load)
    return None if load <= 0 or any(rung.load == load for rung in rungs) else load


def answer_text(one: Answer, rungs: Sequence[Rung], axis: Axis, limits: str) -> str:
    """An answer as a sentence; `limits` is what good requests keep, such as "TTFT 500 ms, TPOT 50 ms"."""
    unit, head = UNITS[axis], f"{100 * one.target:g} % of requests keep {limits}"
    rungs = settled(rungs)
    by_load = {rung.load: rung for rung in rungs}
    if one.load is None:
        lowest = next((rung for rung in rungs if rung.counts), None)
        if lowest is None:
            return f"{head}: not known, no rung is valid"
        return f"{head}: at no rung; {100 * lowest.attainment:.1f} % at {lowest.load:g} {unit}, the lowest"
    text = f"{head} up to {one.load:g} {unit} ({100 * by_load[one.load].attainment:.1f} %)"
    if one.limit is None:
        return f"{text}, the highest rung: play higher ones to find the end"
    if not one.proven:
        return f"{text}; {one.limit:g} proves nothing, it is {by_load[one.limit].level}: play it again"
    return f"{text}; at {one.limit:g}, {100 * by_load[one.limit].attainment:.1f} % do"
