from collections.abc import Callable
from typing import Any

import pytest

from engine.core.lifecycle import check_requests
from engine.core.request import Request, RequestStatus
from engine.errors import IntegrityError

MakeRequest = Callable[..., Request]


@pytest.fixture
def running(make_request: MakeRequest) -> Request:
    """Has computed its prompt of 3 tokens, with the sample in flight."""
    return make_request(
        1,
        3,
        status=RequestStatus.RUNNING,
        num_computed_tokens=3,
        num_pending_tokens=1,
        num_rows_in_flight=1,
        max_num_tokens=7,
    )


@pytest.fixture
def waiting(make_request: MakeRequest) -> Request:
    return make_request(2, 3, max_num_tokens=7)


def test_consistent_requests_pass(running: Request, waiting: Request) -> None:
    check_requests([running, waiting], [running], [waiting], [running])


def test_request_in_no_place_or_in_two_is_noticed(running: Request, waiting: Request) -> None:
    with pytest.raises(IntegrityError, match="2 live requests, but 1 running and 0 waiting"):
        check_requests([running, waiting], [running], [], [running])
    with pytest.raises(IntegrityError, match="1 live requests, but 1 running and 1 waiting"):
        check_requests([running], [running], [running], [running])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", RequestStatus.PREEMPTED, "request 1 has status PREEMPTED, in the running list: True"),
        ("num_rows_in_flight", 2, "request 1 counts 2 rows in flight of 1"),
        ("num_pending_tokens", 2, "request 1 has 2 pending tokens in 1 rows"),
        ("num_computed_tokens", 5, "request 1 has 5 of 4 tokens computed"),
        ("num_computed_tokens", -1, "request 1 has -1 of 4 tokens computed"),
        ("max_num_tokens", 3, "request 1 is not finished with 3 of 3 tokens"),
    ],
)
def test_wrong_progress_of_a_running_request_is_noticed(running: Request, field: str, value: Any, message: str) -> None:
    setattr(running, field, value)
    with pytest.raises(IntegrityError, match=message):
        check_requests([running], [running], [], [running])


def test_scheduler_checks_its_queue(make_engine: Callable[..., Any], make_request: MakeRequest) -> None:
    engine, request = make_engine(), make_request(1, 3)
    engine.add(request)
    request.session = 9
    with pytest.raises(IntegrityError, match="requests by session"):
        engine.scheduler.check_integrity()


def test_computed_tokens_of_a_waiting_request_are_noticed(waiting: Request) -> None:
    waiting.num_computed_tokens = 1
    with pytest.raises(IntegrityError, match="request 2 has 1 of 0 tokens computed"):
        check_requests([waiting], [], [waiting], [])
