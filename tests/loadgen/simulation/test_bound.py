"""The upper bound of goodput: no schedule of small cases exceeds it, and where the answer is known it is that."""

import random
from itertools import combinations

import pytest

from chairlift.service.service_classes import ServiceClass
from engine.core.latency.step_time import Coefficients, StepTimePrior
from loadgen.simulation.bound import upper_bound
from loadgen.simulation.fleet import simulate
from loadgen.simulation.results import is_good
from loadgen.simulation.workload import NO_CLASS, Outcome

SECOND_PER_TOKEN = StepTimePrior(Coefficients(100.0, 1.0, 0.0, 0.0, 0.0))
"""A prompt of n tokens and an answer of m cost n + m - 1 seconds: the prompt yields the first token."""


def soon(ttft_s, inter_token_s=None):
    return ServiceClass(name="soon", ttft_s=ttft_s, inter_token_s=inter_token_s, pacing="paced")


def most_in_time(requests):
    """The most prompts that preemptive earliest-due-first, which is optimal for a given set, computes in time."""
    for size in range(len(requests), 0, -1):
        if any(are_in_time(chosen) for chosen in combinations(requests, size)):
            return size
    return 0


def are_in_time(requests):
    left = {request.index: request.input_tokens for request in requests}
    for now_s in range(100):
        ready = [request for request in requests if request.arrival_s <= now_s and left[request.index]]
        if ready:
            left[min(ready, key=lambda one: one.arrival_s + one.service_class.ttft_s).index] -= 1
        if any(left[one.index] and one.arrival_s + one.service_class.ttft_s <= now_s + 1 for one in requests):
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_exceeds_the_bound(request_of, seed):
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(0, 12) for _ in range(rng.randrange(2, 8)))
    requests = [
        request_of(index, float(at), rng.randrange(1, 8), 1, soon(float(rng.randrange(1, 12))))
        for index, at in enumerate(arrivals)
    ]
    assert most_in_time(requests) <= upper_bound(requests, SECOND_PER_TOKEN, 1, grace_s=30.0) + 1e-9


def test_the_cheapest_requests_come_first_and_the_last_one_counts_in_part(request_of):
    requests = [request_of(index, 0.0, n, 1, soon(12.0)) for index, n in enumerate((4, 9, 5, 1))]
    assert upper_bound(requests, SECOND_PER_TOKEN, 1, grace_s=20.0) == pytest.approx(3 + 2 / 9, rel=1e-3)
    assert upper_bound(requests, SECOND_PER_TOKEN, 2, grace_s=20.0) == 4
    assert upper_bound(requests, SECOND_PER_TOKEN, 1, 20.0, [0, 8, 0, 0]) == 4


def test_time_after_the_due_time_and_before_the_arrival_does_not_count(request_of):
    burst = [request_of(index, 50.0, 4, 1, soon(8.0)) for index in range(6)]
    assert upper_bound([request_of(9, 0.0, 1, 1, soon(8.0)), *burst], SECOND_PER_TOKEN, 1, 50.0) < 1 + 6 * 0.6


def test_best_effort_has_time_until_the_end(request_of):
    requests = [request_of(index, float(index), 10, 1, NO_CLASS) for index in range(4)]
    assert upper_bound(requests, SECOND_PER_TOKEN, 1, grace_s=37.0) == 4
    assert upper_bound(requests, SECOND_PER_TOKEN, 1, grace_s=17.0) == pytest.approx(2.0, rel=1e-3)


def test_later_tokens_are_due_one_gap_after_another(request_of):
    """Ten tokens a second apart from the fourth second on: three of them, and the prompt, must be computed by 7 s."""
    requests = [request_of(index, 0.0, 3, 11, soon(4.0, 1.0)) for index in range(4)]
    assert upper_bound(requests, SECOND_PER_TOKEN, 1, grace_s=1000.0) < 2.0


def test_one_late_gap_that_is_forgiven_may_be_of_any_length(request_of):
    """All prompts first, then one answer after the other: each has one wide gap in 200 tokens, and all are good."""
    long = ServiceClass(name="long", ttft_s=10.0, inter_token_s=1.0, pacing="gap")
    requests = [request_of(index, 0.0, 1, 200, long) for index in range(4)]
    now_s = 0.0
    for request in requests:
        now_s = request.first_s = request.last_s = now_s + 1.0
        request.num_tokens = 1
    for request in requests:
        while request.num_tokens < request.output_tokens:
            now_s += 1.0
            request.num_wide_gaps += now_s - request.last_s > 1.0
            request.last_s = now_s
            request.num_tokens += 1
        request.end(Outcome.COMPLETED, "", now_s)
    assert all(is_good(request) for request in requests)
    last = request_of(4, 1000.0, 1, 1, NO_CLASS)
    assert upper_bound([*requests, last], SECOND_PER_TOKEN, 1, grace_s=100.0) == 5


def test_answers_too_short_for_a_late_gap_are_due_one_gap_after_another_however_gaps_are_judged(request_of):
    gap = ServiceClass(name="short", ttft_s=4.0, inter_token_s=1.0, pacing="gap")
    requests = [request_of(index, 0.0, 3, 99, gap) for index in range(4)]
    last = request_of(4, 1000.0, 1, 1, NO_CLASS)
    assert upper_bound([*requests, last], SECOND_PER_TOKEN, 1, grace_s=1000.0) < 4


@pytest.mark.parametrize(("row_s", "pair_s", "due_s"), [(-0.9, 0.0, 1.0), (0.0, 5.0, 8.0)], ids=["rows", "attention"])
def test_prompts_in_one_token_rows_do_not_exceed_the_bound(request_of, fleet_of, row_s, pair_s, due_s):
    cost = StepTimePrior(Coefficients(0.0, 1.0, row_s, 0.0, pair_s))
    requests = [request_of(index, 0.0, 2, 1, soon(due_s)) for index in range(1, 5)]
    bound = upper_bound(requests, cost, 1, grace_s=8.0)
    simulate(requests, fleet_of("fcfs@1", cost=cost), until_s=8.0)
    assert sum(map(is_good, requests)) == 4
    assert bound == 4


def test_without_any_time_nothing_is_said(request_of):
    assert upper_bound([request_of(1, 0.0, 10, 1, NO_CLASS)], SECOND_PER_TOKEN, 1, grace_s=0.0) == 1
