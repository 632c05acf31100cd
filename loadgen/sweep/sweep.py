"""A ladder of loads: where do latencies bend, and how high may the load be?

Pure: playing a rung is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.errors import LoadgenError
from loadgen.sweep.capacity import Answer, answer, next_probe, settled
from loadgen.sweep.load_level import UNITS, Axis, Rung

# A rung is saturated when less than a tenth of the load that was added comes out as tokens.
_GROWTH_THAT_COUNTS = 0.1


@dataclass(frozen=True, slots=True)
class Sweep:
    """All rungs, and what they say.

    Attributes:
        axis: what the load is.
        rungs: by ascending load; those of one load in the order in which they were played.
        answers: one for each target; empty without limits.
        stopped: why the ladder was not played to its end; "" if it was.
        failure: what broke the sweep off; "" if nothing did.
    """

    axis: Axis
    rungs: tuple[Rung, ...]
    answers: tuple[Answer, ...]
    stopped: str
    failure: str

    @property
    def interrupted(self) -> bool:
        """Stopped by Ctrl-C."""
        return any(rung.interrupted for rung in self.rungs)


def sweep(
    loads: Sequence[float],
    play: Callable[[float], Rung],
    *,
    axis: Axis = "rate",
    targets: Sequence[float] = (),
    bisect: bool = False,
    precision: float = 0.05,
    most_probes: int = 8,
    retries: int = 1,
    keep_going: bool = False,
) -> Sweep:
    """Plays a ladder from below, then, if asked, looks between its rungs for the answers.

    Args:
        loads: ascending.
        play: plays a load; may raise LoadgenError, which ends the sweep with what there is.
        axis: of concurrency, only whole numbers are played.
        targets: shares of requests that shall keep every limit; none without limits.
        bisect: halve the gap between the highest load that does and the lowest that does not.
        precision: a gap of this share of the load is small enough.
        most_probes: for each target.
        retries: how often a load is played again whose rung is INVALID: a busy client may have been to blame.
        keep_going: climb on when saturated.

    Raises: LoadgenError: not even the first rung could be played.
    """
    climber = _Climber(play, UNITS[axis], retries)
    stopped = ""
    for load in loads:
        climber.climb(load)
        if climber.failure:
            break
        stopped = "" if keep_going or load == loads[-1] else _why_stop(climber.rungs, axis, targets)
        if stopped:
            break
    for target in targets if bisect else ():
        for _ in range(most_probes):
            probe = None if climber.failure else next_probe(climber.rungs, target, precision, axis)
            if probe is None:
                break
            climber.climb(probe)
    rungs = tuple(climber.rungs)
    return Sweep(axis, rungs, tuple(answer(rungs, target) for target in targets), stopped, climber.failure)


class _Climber:
    """Plays rungs and keeps them in order of load, until one fails."""

    def __init__(self, play: Callable[[float], Rung], unit: str, retries: int) -> None:
        self.rungs: list[Rung] = []
        self.failure = ""
        self._play, self._unit, self._retries = play, unit, retries

    def climb(self, load: float) -> None:
        for _ in range(1 + self._retries):
            try:
                rung = self._play(load)
            except LoadgenError as error:
                if not self.rungs:
                    raise
                self.failure = f"at {load:g} {self._unit}: {error}"
                return
            self.rungs = sorted([*self.rungs, rung], key=lambda one: one.load)
            if rung.interrupted:
                self.failure = f"stopped at {load:g} {self._unit}"
            if rung.interrupted or rung.level != "INVALID":
                return


def _why_stop(played: Sequence[Rung], axis: Axis, targets: Sequence[float]) -> str:
    """Why climbing on would show nothing new; "" if it would."""
    rungs, unit = settled(played), UNITS[axis]
    this, below = rungs[-1], [rung for rung in rungs[:-1] if rung.counts]
    if len(rungs) > 1 and rungs[-1].level == rungs[-2].level == "INVALID":
        return f"two rungs in a row are INVALID, up to {this.load:g} {unit}; --keep-going climbs on"
    if not below or not this.counts or (targets and this.attainment >= min(targets)):
        return ""
    best = max(below, key=lambda rung: rung.output_tokens_per_s)
    wanted = best.output_tokens_per_s * (1 + _GROWTH_THAT_COUNTS * (this.load / best.load - 1))
    if this.output_tokens_per_s >= wanted:
        return ""
    return (
        f"saturated at {this.load:g} {unit}: {this.output_tokens_per_s:,.0f} tokens/s after "
        f"{best.output_tokens_per_s:,.0f} at {best.load:g}; --keep-going climbs on"
    )
