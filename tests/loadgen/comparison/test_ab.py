"""Sides take turns, pairs share their prompts, and what was run is kept whatever fails."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

import pytest

from loadgen.comparison.ab import AbRuns, Turn, ab, turns
from loadgen.errors import TargetError
from loadgen.record import RunData
from tests.support.loadgen.runs import run_of

RUN = run_of([])
LABELS = ("old", "new")


@dataclass(frozen=True)
class Outcome:
    turn: Turn
    run: RunData = RUN


def order(repeats: int, *, may_be_one_server: bool = False) -> list[Turn]:
    numbers = count()
    return list(turns(repeats, lambda: f"salt {next(numbers)}", may_be_one_server=may_be_one_server))


def play_until(fails: Callable[[Turn], bool], repeats: int = 3) -> AbRuns[Outcome]:
    def run_once(turn: Turn) -> Outcome:
        if fails(turn):
            raise TargetError("no server answers at grpc://127.0.0.1:1")
        return Outcome(turn)

    return ab(iter(order(repeats)), run_once, LABELS)


def test_sides_take_turns_in_going_first() -> None:
    assert "".join("AB"[turn.side] for turn in order(4)) == "ABBAABBA"
    assert [turn.pair for turn in order(3)] == [0, 0, 1, 1, 2, 2]


def test_a_pair_shares_its_prompts_and_no_two_pairs_do() -> None:
    salts = [turn.salt for turn in order(3)]
    assert salts[0::2] == salts[1::2]
    assert len(set(salts)) == 3


def test_one_server_never_sees_a_prompt_twice() -> None:
    assert len({turn.salt for turn in order(3, may_be_one_server=True)}) == 6


def test_pairs_are_a_and_b_whoever_went_first() -> None:
    measured = play_until(lambda turn: False)
    assert [(first.turn.side, second.turn.side) for first, second in measured.pairs] == [(0, 1)] * 3
    assert all(first.turn.pair == second.turn.pair for first, second in measured.pairs)
    assert (measured.failure, measured.interrupted) == ("", False)


def test_nothing_is_run_ahead() -> None:
    """A salt is drawn, and a server started, only when its turn comes."""
    drawn: list[Turn] = []

    def watched() -> Iterator[Turn]:
        for turn in order(2):
            drawn.append(turn)
            yield turn

    def run_once(turn: Turn) -> Outcome:
        assert drawn[-1] == turn
        return Outcome(turn)

    assert len(ab(watched(), run_once, LABELS).pairs) == 2


def test_a_failure_ends_it_and_says_whose_and_keeps_the_rest() -> None:
    """Order A B B A A B: B fails in its second run, when the first pair is whole and nothing else waits."""
    measured = play_until(lambda turn: (turn.side, turn.pair) == (1, 1))
    assert measured.failure == "new, run 2: no server answers at grpc://127.0.0.1:1"
    assert len(measured.pairs) == 1


def test_the_other_side_of_a_broken_pair_is_kept() -> None:
    measured = play_until(lambda turn: (turn.side, turn.pair) == (0, 1))
    assert measured.failure.startswith("old, run 2: ")


def test_a_side_that_never_worked_leaves_no_pair() -> None:
    measured = play_until(lambda turn: turn.side == 1)
    assert measured.pairs == ()


def test_ctrl_c_ends_it_and_the_broken_run_is_not_compared() -> None:
    def run_once(turn: Turn) -> Outcome:
        return Outcome(turn, replace(RUN, interrupted=turn == order(3)[3]))

    measured = ab(iter(order(3)), run_once, LABELS)
    assert measured.interrupted
    assert measured.failure == "old, run 2: stopped before its end"
    assert len(measured.pairs) == 1


def test_ctrl_c_between_two_runs_keeps_the_pairs_that_are_whole() -> None:
    def stopped_at(turn: int) -> AbRuns[Outcome]:
        def run_once(one: Turn) -> Outcome:
            if one == order(3)[turn]:
                raise KeyboardInterrupt
            return Outcome(one)

        return ab(iter(order(3)), run_once, LABELS)

    measured = stopped_at(3)
    assert measured.interrupted
    assert measured.failure == "old, run 2: stopped before it was over"
    assert len(measured.pairs) == 1
    with pytest.raises(KeyboardInterrupt):
        stopped_at(1)


def test_what_is_no_fault_of_user_or_server_is_not_swallowed() -> None:
    def run_once(turn: Turn) -> Outcome:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ab(iter(order(1)), run_once, LABELS)
