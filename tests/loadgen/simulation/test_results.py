"""Goodput by class, the upper bound, and the size of a fleet."""

import math
from array import array

import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.simulation.fleet import FleetRun
from loadgen.simulation.results import Replay, is_good, summarize
from loadgen.simulation.sizing import engines_for
from loadgen.simulation.workload import NO_CLASS, Outcome

GAP = ServiceClass(name="gap", ttft_s=1.0, inter_token_s=0.1)
PACED = ServiceClass(name="paced", ttft_s=1.0, inter_token_s=0.1, pacing="paced")


@pytest.fixture
def ended(request_of):
    def make(
        index=1, arrival_s=0.0, *, service_class=GAP, ttft_s=0.5, late=0, wide=0, outcome=Outcome.COMPLETED, n=100
    ):
        request = request_of(index, arrival_s, 10 * index, n, service_class)
        if outcome is not Outcome.REFUSED:
            request.first_s, request.last_s, request.num_tokens = arrival_s + ttft_s, arrival_s + ttft_s + 9.9, n
            request.num_computed_tokens = 10 * index
        request.num_late_tokens, request.num_wide_gaps = late, wide
        request.end(outcome, "test", arrival_s + 20.0)
        return request

    return make


def test_a_good_request_is_complete_in_time_and_paced_as_its_class_says(ended):
    assert is_good(ended())
    assert is_good(ended(ttft_s=1.0))
    assert not is_good(ended(ttft_s=1.01))
    assert not is_good(ended(outcome=Outcome.UNFINISHED))
    assert not is_good(ended(outcome=Outcome.REFUSED))
    assert is_good(ended(wide=1, late=50))  # one of a hundred gaps
    assert not is_good(ended(wide=2))
    assert is_good(ended(service_class=PACED, wide=50, late=1))
    assert not is_good(ended(service_class=PACED, late=2))
    assert not is_good(ended(wide=1, n=99))  # one percent forgives nothing below 100 tokens
    assert is_good(ended(service_class=NO_CLASS, ttft_s=1e6))


def test_a_summary_counts_what_arrived_after_the_warmup(ended, fleet_of):
    requests = [
        ended(1, 0.0, ttft_s=9.0),
        ended(2, 10.0),
        ended(3, 12.0, ttft_s=2.0),
        ended(4, 14.0, outcome=Outcome.REFUSED),
        ended(5, 20.0, service_class=NO_CLASS),
    ]
    run = FleetRun(
        ended_s=40.0, num_steps=7, busy_s=20.0, num_prompt_tokens=110, gaps_s={"gap": array("d", [0.1, 0.3])}
    )
    result = summarize([Replay(requests, run)], fleet_of(num_engines=2), warmup_s=10.0, num_accelerators=4)
    assert (result.span_s, result.offered_per_s, result.good_requests_per_s) == (10.0, 0.4, 0.2)
    assert result.good_tokens_per_s == (20 + 100 + 50 + 100) / 10
    assert [(one.name, one.num_requests, one.num_good, one.num_refused) for one in result.classes] == [
        ("gap", 3, 1, 1),
        ("default", 1, 1, 0),
    ]
    assert result.total.num_requests == result.total.num_completed + result.total.num_refused == 4
    assert result.longest_quarter_share == 0.0  # the refused request has the longest prompt of those with targets
    assert result.vain_work_share == (10 + 30) / 110  # of the warm-up too
    assert (result.engine_s, result.accelerator_s, result.busy_share) == (80.0, 320.0, 0.25)
    assert result.accelerator_s_per_good_mtoken == pytest.approx(10 * 2 * 4 / 270 * 1e6)
    assert result.classes[0].inter_token_s.n == 2
    assert math.isnan(result.classes[1].inter_token_s.p50)


def test_repeats_are_counted_together(ended, fleet_of):
    def replay():
        return Replay([ended(1, 0.0), ended(2, 10.0, ttft_s=2.0)], FleetRun(ended_s=30.0, num_steps=5))

    result = summarize([replay(), replay()], fleet_of())
    assert (result.total.num_requests, result.total.num_good, result.num_steps) == (4, 2, 10)
    assert (result.span_s, result.good_requests_per_s, result.engine_s) == (20.0, 0.1, 60.0)


def test_work_for_an_answer_that_the_end_cut_off_in_time_is_not_in_vain(ended, fleet_of):
    def share(*requests):
        return summarize([Replay(requests, FleetRun(ended_s=40.0))], fleet_of()).vain_work_share

    assert share(ended(1), ended(2, outcome=Outcome.UNFINISHED)) == 0.0
    assert share(ended(1), ended(2, outcome=Outcome.UNFINISHED, ttft_s=1.5)) == 20 / 30
    assert share(ended(1), ended(2, outcome=Outcome.UNFINISHED, wide=5)) == 20 / 30
    assert share(ended(1), ended(2, ttft_s=1.5)) == 20 / 30


def test_the_smallest_fleet_is_found():
    for needed in (1, 2, 3, 7, 8, 100):
        sizing = engines_for(lambda n, needed=needed: min(1.0, n / needed), 1.0, 128)
        assert sizing.num_engines == needed
        assert len(sizing.tried) <= 2 * 7 + 1
    none = engines_for(lambda _: 0.5, 0.9, 12)
    assert none.num_engines is None
    assert [num_engines for num_engines, _ in none.tried] == [1, 2, 4, 8, 12]
