"""Requests and parts of the measured steps."""

from collections import Counter
from itertools import islice

from engine.bench.step_overhead import arriving_requests, median_step


def test_under_churn_a_fifth_ends_in_every_step() -> None:
    first = list(islice(arriving_requests(10, 4, churn=True), 10))
    assert Counter(request.params.max_tokens for request in first) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    later = list(islice(arriving_requests(10, 4, churn=True), 10, 30))
    assert {request.params.max_tokens for request in later} == {5}


def test_without_churn_no_request_ends() -> None:
    requests = list(islice(arriving_requests(10, 4, churn=False), 10))
    assert {request.params.max_tokens for request in requests} == {1024}


def test_prompts_are_unique() -> None:
    requests = list(islice(arriving_requests(10, 32, churn=True), 50))
    assert len({request.prompt_ids for request in requests}) == 50


def test_the_parts_are_within_the_whole() -> None:
    times = median_step(5, 7, churn=True)
    assert 0 < max(times[1:]) < times.step_ms
