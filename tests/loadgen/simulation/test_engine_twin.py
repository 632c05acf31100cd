"""One engine in virtual time against schedules computed by hand."""

import math

import pytest

from loadgen.simulation.fleet import simulate
from loadgen.simulation.workload import Outcome


def times(requests):
    return [(request.first_s, request.ended_s) for request in requests]


def test_three_requests_follow_the_schedule_computed_by_hand(request_of, fleet_of):
    """Budget 8 tokens, a step of n tokens takes 1 + n/8 s.

    step 1  0 to 2        A's 4 prompt tokens and 4 of B's 6             A's first token
    step 2  2 to 3.375    A's token, B's last 2                          B's first token
    step 3  3.375 to 5.375  A's and B's tokens, 6 of C's 9, which came at 2.5
    step 4  5.375 to 6.875  B's token (A ended with its third), C's last 3
    step 5  6.875 to 8.125  B's and C's last tokens
    """
    a, b, c = request_of(1, 0.0, 4, 3), request_of(2, 0.0, 6, 4), request_of(3, 2.5, 9, 2)
    run = simulate([a, b, c], fleet_of())
    assert times([a, b, c]) == [(2.0, 5.375), (3.375, 8.125), (6.875, 8.125)]
    assert run.num_steps == 5
    assert run.busy_s == 2 + 1.375 + 2 + 1.5 + 1.25
    assert run.num_prompt_tokens == 19
    assert [request.num_computed_tokens for request in (a, b, c)] == [4, 6, 9]
    assert list(run.gaps_s["default"]) == [1.375, 2.0, 2.0, 1.5, 1.25, 1.25]


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_prompts_and_chunks_of_one_token_are_counted(request_of, fleet_of, max_steps_in_flight):
    """The budget is 8: of B's 9 tokens the last one is a chunk of its own."""
    requests = [request_of(1, 0.0, 1, 3), request_of(2, 0.5, 9, 2), request_of(3, 20.0, 9, 1)]
    run = simulate(requests, fleet_of(max_steps_in_flight=max_steps_in_flight))
    assert [request.num_computed_tokens for request in requests] == [1, 9, 9]
    assert run.num_prompt_tokens == 19


def test_with_two_steps_in_flight_a_request_waits_one_step_longer_and_the_end_is_seen_late(request_of, fleet_of):
    """A's steps take 1.5, 1.125, ... s.

    The second step is planned at 0, so B, which comes at 0.5, is in the third, which is planned at 1.5 and runs from
    2.625. A's answer ends with step 3, when step 4 is planned already: it has a wasted row of A's.
    """
    a, b = request_of(1, 0.0, 4, 3), request_of(2, 0.5, 4, 2)
    run = simulate([a, b], fleet_of(max_steps_in_flight=2))
    third_s = 1.5 + 1.125 + 1 + 5 / 8
    assert times([a, b]) == [(1.5, third_s), (third_s, third_s + 1 + 2 / 8)]
    assert run.num_steps == 4
    assert run.busy_s == third_s + 1 + 2 / 8
    one = [request_of(1, 0.0, 4, 3), request_of(2, 0.5, 4, 1)]
    simulate(one, fleet_of(max_steps_in_flight=1))
    assert one[1].first_s == 1.5 + 1 + 5 / 8


def test_a_full_queue_refuses_and_a_queue_timeout_drops(request_of, fleet_of, interactive):
    slow = [request_of(index, 0.0, 8, 20, interactive) for index in range(1, 20)]
    simulate(slow, fleet_of("fcfs-bounded@8", [interactive], max_num_seqs=1))
    assert [request.reason for request in slow].count("QueueFull") == 3  # 16 wait, none runs yet
    waiting = [request_of(index, 0.0, 8, 20, interactive) for index in range(1, 4)]
    simulate(waiting, fleet_of("fcfs-timeout@8", [interactive], max_num_seqs=1))
    assert [(request.outcome, request.reason) for request in waiting] == [
        (Outcome.COMPLETED, "END_TOKEN"), (Outcome.REFUSED, "DEADLINE"), (Outcome.REFUSED, "DEADLINE"),
    ]  # fmt: skip
    assert 4.0 < waiting[1].ended_s < 6.5  # between two steps, once 4 s have passed


def test_shortest_first_and_priority_order_the_queue(request_of, fleet_of, interactive):
    def order(policy):
        requests = [
            request_of(1, 0.0, 8, 1), request_of(2, 0.1, 7, 1), request_of(3, 0.2, 5, 1, interactive),
            request_of(4, 0.3, 2, 1),
        ]  # fmt: skip
        simulate(requests, fleet_of(policy, [interactive, requests[0].service_class], max_num_seqs=1))
        return [r.index for r in sorted(requests, key=lambda request: request.first_s)]

    assert order("fcfs@8") == [1, 2, 3, 4]
    assert order("priority@8") == [1, 3, 2, 4]
    assert order("shortest@8") == [1, 4, 3, 2]


def test_the_latency_aware_policy_refuses_what_cannot_be_in_time(request_of, fleet_of, interactive):
    requests = [request_of(index, 0.0, 16, 2, interactive) for index in range(1, 11)]
    simulate(requests, fleet_of("slo@16", [interactive]))
    refused = [request for request in requests if request.reason == "INFEASIBLE"]
    served = [request for request in requests if request.outcome is Outcome.COMPLETED]
    assert refused
    assert served
    assert len(refused) + len(served) == 10


def test_what_is_open_at_the_end_is_unfinished(request_of, fleet_of):
    requests = [request_of(1, 0.0, 8, 50), request_of(2, 3.0, 8, 1), request_of(3, 100.0, 8, 1)]
    run = simulate(requests, fleet_of(), until_s=3.5)
    assert {request.outcome for request in requests} == {Outcome.UNFINISHED}
    assert run.ended_s == 3.5
    assert requests[0].num_tokens == 2
    assert math.isnan(requests[1].first_s)


def test_a_request_ends_once(request_of):
    request = request_of(1, 0.0, 8, 1)
    request.end(Outcome.COMPLETED, "END_TOKEN", 1.0)
    with pytest.raises(AssertionError, match="request 1 is refused after it was"):
        request.end(Outcome.REFUSED, "DEADLINE", 2.0)
