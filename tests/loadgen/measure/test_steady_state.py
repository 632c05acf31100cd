"""Which part of a run is measured."""

import pytest

from loadgen.measure.samples import samples_of
from loadgen.measure.steady_state import Span, steady_span
from loadgen.record import Status
from tests.support.loadgen.runs import Answered, run_of


def _span(played: list[Answered], warmup_s: float = 0.0, *, interrupted: bool = False) -> Span:
    run = run_of(played, ended_s=100.0)
    return steady_span(samples_of(run), warmup_s=warmup_s, ended_s=run.ended_s, interrupted=interrupted)


def _even(count: int, answer_s: float = 0.2) -> list[Answered]:
    return [Answered(float(i), ((i + 0.1, 1), (i + answer_s, 1))) for i in range(count)]


def test_from_the_warm_up_to_the_last_arrival() -> None:
    assert _span(_even(11), 2.0) == (2.0, 10.0, True)


def test_all_at_once_has_no_steady_state() -> None:
    assert _span([Answered(0.0, ((0.1, 1),)), Answered(0.0, ((0.2, 1),))]) == (0.0, 100.0, False)
    assert _span([Answered(0.0, ((0.1, 1),))]) == (0.0, 100.0, False)
    assert _span([]) == (0.0, 100.0, False)


def test_a_warm_up_of_the_whole_schedule_leaves_none() -> None:
    assert _span(_even(11), 10.0) == (0.0, 100.0, False)
    assert _span(_even(11), 11.0) == (0.0, 100.0, False)


@pytest.mark.parametrize(("answer_s", "steady"), [(0.2, True), (8.5, True), (9.5, False), (30.0, False)])
def test_a_burst_that_is_over_before_a_tenth_is_answered_has_none(answer_s: float, steady: bool) -> None:
    assert _span(_even(11, answer_s)).steady == steady


def test_an_interrupted_run_ends_with_the_last_request_that_was_sent() -> None:
    played = [*_even(6), *(Answered(float(i), status=Status.UNSENT) for i in range(6, 11))]
    assert _span(played, interrupted=True) == (0.0, 5.0, True)
    assert _span(played) == (0.0, 10.0, True)


def test_both_ends_belong_to_it() -> None:
    run = run_of(_even(4))
    assert Span(1.0, 2.0, steady=True).holds(samples_of(run).scheduled_s).tolist() == [False, True, True, False]
