"""Sweep over rising loads: where latencies begin to rise, and the highest load that keeps the targets.

Pure: running a load level is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadgen.errors import LoadgenError
from loadgen.sweep.capacity import Answer, answer, next_probe, settled
from loadgen.sweep.load_level import UNITS, Axis, LoadLevel

# A load level is saturated when less than a tenth of the load that was added comes out as tokens.
_GROWTH_THAT_COUNTS = 0.1


@dataclass(frozen=True, slots=True)
class Sweep:
    """All load levels, and what they say.

    Attributes:
        axis: what the load is.
        load_levels: by ascending load; those of one load in the order in which they were run.
        answers: one for each target; empty without limits.
        stopped: why not all loads were run; "" if it was.
        failure: what broke the sweep off; "" if nothing did.
        interrupted: that was Ctrl-C.
    """

    axis: Axis
    load_levels: tuple[LoadLevel, ...]
    answers: tuple[Answer, ...]
    stopped: str
    failure: str
    interrupted: bool = False


def sweep(
    loads: Sequence[float],
    run_once: Callable[[float], LoadLevel],
    *,
    axis: Axis = "rate",
    targets: Sequence[float] = (),
    bisect: bool = False,
    precision: float = 0.05,
    max_probes: int = 8,
    retries: int = 1,
    keep_going: bool = False,
) -> Sweep:
    """Runs loads from the lowest up, then, if asked, looks between them for the answers.

    Args:
        loads: ascending.
        run_once: runs a load; may raise LoadgenError or KeyboardInterrupt, which ends the sweep with what there is.
        axis: of concurrency, only whole numbers are run.
        targets: shares of requests that shall keep every limit; none without limits.
        bisect: halve the gap between the highest load that does and the lowest that does not.
        precision: a gap of this share of the load is small enough.
        max_probes: for each target.
        retries: how often a load is run again whose load level is INVALID: a busy client may have been to blame.
        keep_going: continue when saturated.

    Raises: LoadgenError, KeyboardInterrupt: not even the first load level could be run.
    """
    climber = _Climber(run_once, UNITS[axis], retries)
    stopped = ""
    for load in loads:
        climber.climb(load)
        if climber.failure:
            break
        stopped = "" if keep_going or load == loads[-1] else _why_stop(climber.load_levels, axis, targets)
        if stopped:
            break
    for target in targets if bisect else ():
        for _ in range(max_probes):
            probe = None if climber.failure else next_probe(climber.load_levels, target, precision, axis)
            if probe is None:
                break
            climber.climb(probe)
    load_levels = tuple(climber.load_levels)
    answers = tuple(answer(load_levels, target) for target in targets)
    return Sweep(axis, load_levels, answers, stopped, climber.failure, climber.interrupted)


class _Climber:
    """Runs load levels and keeps them in order of load, until one fails."""

    def __init__(self, run_once: Callable[[float], LoadLevel], unit: str, retries: int) -> None:
        self.load_levels: list[LoadLevel] = []
        self.failure = ""
        self.interrupted = False
        self._run_once, self._unit, self._retries = run_once, unit, retries

    def climb(self, load: float) -> None:
        for _ in range(1 + self._retries):
            try:
                load_level = self._run_once(load)
            except LoadgenError as error:
                if not self.load_levels:
                    raise
                self.failure = f"at {load:g} {self._unit}: {error}"
                return
            except KeyboardInterrupt:  # between runs, or while one was prepared or reported
                if not self.load_levels:
                    raise
                self.failure, self.interrupted = f"stopped before {load:g} {self._unit}", True
                return
            self.load_levels = sorted([*self.load_levels, load_level], key=lambda one: one.load)
            if load_level.interrupted:
                self.failure, self.interrupted = f"stopped at {load:g} {self._unit}", True
            if load_level.interrupted or load_level.level != "INVALID":
                return


def _why_stop(finished: Sequence[LoadLevel], axis: Axis, targets: Sequence[float]) -> str:
    """Why climbing on would show nothing new; "" if it would."""
    load_levels, unit = settled(finished), UNITS[axis]
    this, below = load_levels[-1], [load_level for load_level in load_levels[:-1] if load_level.counts]
    if len(load_levels) > 1 and load_levels[-1].level == load_levels[-2].level == "INVALID":
        return f"two load levels in a row are INVALID, up to {this.load:g} {unit}; --keep-going continues"
    if not below or not this.counts or (targets and this.attainment >= min(targets)):
        return ""
    best = max(below, key=lambda load_level: load_level.output_tokens_per_s)
    wanted = best.output_tokens_per_s * (1 + _GROWTH_THAT_COUNTS * (this.load / best.load - 1))
    if this.output_tokens_per_s >= wanted:
        return ""
    return (
        f"saturated at {this.load:g} {unit}: {this.output_tokens_per_s:,.0f} tokens/s after "
        f"{best.output_tokens_per_s:,.0f} at {best.load:g}; --keep-going continues"
    )
