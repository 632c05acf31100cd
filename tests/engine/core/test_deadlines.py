from engine.core.deadlines import Deadlines
from engine.core.request import RequestId


def test_due_requests_come_earliest_first_and_once() -> None:
    deadlines = Deadlines()
    for request_id, deadline_s in ((1, 3.0), (2, 1.0), (3, 2.0)):
        deadlines.add(RequestId(request_id), deadline_s)
    assert deadlines.next_s == 1.0
    assert deadlines.pop_due(0.5) == []
    assert deadlines.pop_due(2.0) == [2, 3]
    assert deadlines.pop_due(2.0) == []
    assert deadlines.next_s == 3.0


def test_discarded_requests_are_never_due() -> None:
    deadlines = Deadlines()
    deadlines.add(RequestId(1), 1.0)
    deadlines.add(RequestId(2), 2.0)
    deadlines.discard(RequestId(1))
    deadlines.discard(RequestId(1))
    assert deadlines.next_s == 2.0
    assert deadlines.pop_due(9.0) == [2]
    assert deadlines.next_s is None


def test_far_deadlines_of_finished_requests_are_forgotten() -> None:
    deadlines = Deadlines()
    for index in range(10_000):
        deadlines.add(RequestId(index), 1e9)
        deadlines.discard(RequestId(index))
    assert len(deadlines._heap) < 100
