from collections.abc import Callable

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.deadlines import Deadlines
from engine.core.request import Request, RequestId

MakeRequest = Callable[..., Request]


def test_due_requests_come_earliest_first_and_once(make_request: MakeRequest) -> None:
    deadlines = Deadlines()
    for request_id, deadline_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        deadlines.add(make_request(request_id, 1, deadline_s=deadline_s))
    deadlines.add(make_request(4, 1))
    assert deadlines.next_s == 1.0
    assert deadlines.pop_due(0.5) == []
    assert deadlines.pop_due(2.0) == [(2, EndReason.DEADLINE), (3, EndReason.DEADLINE)]
    assert deadlines.pop_due(2.0) == []
    assert deadlines.next_s == 3.0


@pytest.mark.parametrize(
    ("deadline_s", "budget_end_s", "due"),
    [
        (None, 1.0, (1.0, EndReason.TIME_BUDGET)),
        (2.0, 1.0, (1.0, EndReason.TIME_BUDGET)),
        (1.0, 1.0, (1.0, EndReason.TIME_BUDGET)),
        (1.0, 2.0, (1.0, EndReason.DEADLINE)),
    ],
)
def test_the_earlier_of_deadline_and_budget_counts_and_of_equals_the_budget(
    make_request: MakeRequest, deadline_s: float | None, budget_end_s: float, due: tuple[float, EndReason]
) -> None:
    deadlines = Deadlines()
    deadlines.add(make_request(1, 1, deadline_s=deadline_s, budget_end_s=budget_end_s))
    assert deadlines.next_s == due[0]
    assert deadlines.pop_due(9.0) == [(1, due[1])]
    assert deadlines.next_s is None


def test_discarded_requests_are_never_due(make_request: MakeRequest) -> None:
    deadlines = Deadlines()
    deadlines.add(make_request(1, 1, deadline_s=1.0))
    deadlines.add(make_request(2, 1, deadline_s=2.0))
    deadlines.discard(RequestId(1))
    deadlines.discard(RequestId(1))
    assert deadlines.next_s == 2.0
    assert deadlines.pop_due(9.0) == [(2, EndReason.DEADLINE)]
    assert deadlines.next_s is None


def test_far_deadlines_of_finished_requests_are_forgotten(make_request: MakeRequest) -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.add(make_request(index, 1, deadline_s=1e9))
        deadlines.discard(RequestId(index))
    assert len(deadlines._heap) < 100


def test_the_earliest_is_first_after_many_were_discarded(make_request: MakeRequest) -> None:
    """Removing the discarded entries restores the order of the others."""
    deadlines = Deadlines()
    deadlines.add(make_request(1, 1, deadline_s=9.0))
    deadlines.add(make_request(2, 1, deadline_s=5.0))
    for index in range(3, 1000):
        deadlines.add(make_request(index, 1, deadline_s=1.0))
        deadlines.discard(RequestId(index))
    assert [request_id for request_id, _ in deadlines.pop_due(10.0)] == [2, 1]
