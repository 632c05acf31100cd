"""Runs two servers in turn: A B, B A, A B, ..., so that changes of the machine affect both alike.

Pure: it says who runs when and with which prompts, and keeps account; running itself is handed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from loadgen.errors import LoadgenError
from loadgen.record import RunData


class HasRun(Protocol):
    """Result of a turn, as `loadgen.cli.run_options.Outcome`."""

    @property
    def run(self) -> RunData:
        """The run."""


T = TypeVar("T", bound=HasRun)


class Turn(NamedTuple):
    """One run.

    Attributes:
        pair: which pair it belongs to, from 0.
        side: 0 is A, 1 is B.
        salt: of its prompts.
    """

    pair: int
    side: int
    salt: str


@dataclass(frozen=True, slots=True)
class AbRuns(Generic[T]):
    """What was run.

    Attributes:
        pairs: (A, B) of every pair that is whole, in order.
        failure: what went wrong, and where; "" if nothing did.
        interrupted: stopped by Ctrl-C.
    """

    pairs: tuple[tuple[T, T], ...]
    failure: str
    interrupted: bool


def turns(repeats: int, new_salt: Callable[[], str], *, may_be_one_server: bool) -> Iterator[Turn]:
    """Returns the order of runs: pairs of turns, every other pair reversed.

    Args:
        repeats: pairs.
        new_salt: a text that was never given before; prompts made with it are in no cache.
        may_be_one_server: both sides may ask the same server, which would have the prompts of the first in its cache
            for the second. Otherwise a pair shares its salt, so that both sides get the very same prompts.
    """
    for pair in range(repeats):
        salt = new_salt()
        for place, side in enumerate((0, 1) if pair % 2 == 0 else (1, 0)):
            yield Turn(pair, side, new_salt() if may_be_one_server and place else salt)


def ab(order: Iterator[Turn], run_once: Callable[[Turn], T], labels: tuple[str, str]) -> AbRuns[T]:
    """Runs all turns until one fails or is interrupted; earlier results are kept.

    Args:
        order: of the turns.
        run_once: runs one; may raise LoadgenError or KeyboardInterrupt.
        labels: what people call A and B.

    Raises: KeyboardInterrupt: no pair is whole yet.
    """
    pairs: list[tuple[T, T]] = []
    waiting: T | None = None
    for turn in order:
        try:
            outcome = run_once(turn)
        except LoadgenError as error:
            text = f"{labels[turn.side]}, run {turn.pair + 1}: {error}"
            return AbRuns(tuple(pairs), text, interrupted=False)
        except KeyboardInterrupt:  # between runs, or while one was prepared or reported
            if not pairs:
                raise
            text = f"{labels[turn.side]}, run {turn.pair + 1}: stopped before it was over"
            return AbRuns(tuple(pairs), text, interrupted=True)
        if outcome.run.interrupted:
            text = f"{labels[turn.side]}, run {turn.pair + 1}: stopped before its end"
            return AbRuns(tuple(pairs), text, interrupted=True)
        if waiting is None:
            waiting = outcome
        else:
            pairs.append((waiting, outcome) if turn.side else (outcome, waiting))
            waiting = None
    return AbRuns(tuple(pairs), "", interrupted=False)
