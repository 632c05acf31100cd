"""The queue of the `slo` policy."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.latency.lane_queue import LaneQueue
from engine.core.latency.pacing import Lane, pace_of
from engine.core.latency.targets import LatencyTargets
from engine.core.latency.tenant_shares import MAX_TENANTS, TenantShares
from engine.core.request import Request
from engine.errors import IntegrityError


@pytest.fixture
def shares() -> TenantShares:
    return TenantShares()


@pytest.fixture
def queue(shares: TenantShares) -> LaneQueue:
    return LaneQueue(shares)


@pytest.fixture
def push(make_request: Callable[..., Request], queue: LaneQueue, shares: TenantShares) -> Callable[..., Request]:
    def push_one(request_id: int, ttft_s: float | None = None, **fields: Any) -> Request:
        request = make_request(request_id, 5, targets=LatencyTargets(ttft_s=ttft_s), arrival_index=request_id, **fields)
        request.pace = pace_of(request)
        shares.enter(request.tenant)
        queue.push(request)
        return request

    return push_one


def drained(queue: LaneQueue) -> list[int]:
    ids = []
    while (head := queue.head) is not None:
        ids.append(head.request_id)
        queue.remove(head)
        queue.check_integrity()
    return ids


def test_requests_on_time_come_first_by_due_time_and_then_best_effort_by_age(
    push: Callable[..., Request], queue: LaneQueue
) -> None:
    push(1)
    push(2, ttft_s=9.0)
    push(3, ttft_s=1.0)
    push(4, arrival_s=5.0, waited_s=9.0)
    assert (len(queue), queue.num_tokens) == (4, 20)
    assert {request.request_id for request in queue} == {1, 2, 3, 4}
    assert [entry[2].request_id for entry in queue.on_time] == [3, 2]
    assert drained(queue) == [3, 2, 4, 1]
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_the_head_of_best_effort_is_that_of_the_tenant_served_least(
    push: Callable[..., Request], queue: LaneQueue, shares: TenantShares
) -> None:
    for number in range(4):
        push(number, tenant="ab"[number % 2])
    heads = []
    while (head := queue.first(Lane.BEST_EFFORT)) is not None:
        heads.append(head.request_id)
        queue.remove(head)
        shares.charge(head.tenant, 100.0 if head.tenant == "a" else 30.0)
    assert heads == [0, 1, 3, 2]


def test_a_tenant_that_was_forgotten_is_served_by_its_new_counter(
    push: Callable[..., Request], queue: LaneQueue, shares: TenantShares
) -> None:
    push(1, tenant="light")
    served = push(2, tenant="heavy")
    shares.charge("heavy", 1e6)
    assert queue.head is not None
    assert queue.head.tenant == "light"
    queue.remove(served)
    shares.leave("heavy")
    for number in range(MAX_TENANTS):
        shares.enter(str(number))
        shares.leave(str(number))
    push(3, tenant="heavy")
    assert shares.tokens("heavy") == shares.tokens("light")
    shares.charge("light", 1.0)
    assert drained(queue) == [3, 1]


def test_requests_without_credit_are_in_no_lane(push: Callable[..., Request], queue: LaneQueue) -> None:
    push(1, ttft_s=1.0, token_credit=0)
    assert (queue.head, len(queue)) == (None, 1)


def test_a_request_that_changed_its_lane_while_queued_is_reported(
    push: Callable[..., Request], queue: LaneQueue
) -> None:
    request = push(1, ttft_s=1.0)
    assert request.pace is not None
    request.pace.lane = Lane.BEST_EFFORT
    with pytest.raises(IntegrityError, match="request 1 is queued in lane ON_TIME"):
        queue.check_integrity()
