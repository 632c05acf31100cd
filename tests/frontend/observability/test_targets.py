"""Outcomes of targets, judged by the times at which tokens are sent; tokens of tenants, whose series are bounded."""

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.outcome import Outcome
from frontend.observability.request_events import RequestEnd, RequestProgress
from frontend.observability.target_meter import TargetMeter
from frontend.types import LatencyTargets, RetryResult

COMPLETE = RequestEnd(Outcome.STOP, is_complete=True, error_code="")
CANCELLED = RequestEnd(Outcome.CANCELLED, is_complete=False, error_code="CANCELLED")
SHED = RequestEnd(Outcome.SHED, is_complete=False, error_code="TARGETS_INFEASIBLE")
INVALID = RequestEnd(None, is_complete=False, error_code="INVALID_REQUEST")


@pytest.fixture
def outcome(metrics, scrape):
    """outcome(targets, chunks, end): chunks are (seconds after acceptance, tokens, answer); the outcome counted."""

    def judge(targets, chunks=(), end=COMPLETE):
        request = RequestProgress(arrived_at_s=1000.0, streamed=True, is_accepted=True, accepted_at_s=1000.0)
        meter = TargetMeter(metrics.targets, targets)
        for at_s, num_tokens, answer in chunks:
            request.first_token_at_s = request.first_token_at_s or 1000 + at_s
            request.started = request.started or pb.Started(num_prompt_tokens=7)
            request.num_sent_tokens += num_tokens
            meter.tokens_sent(request, answer, num_tokens, 1000 + at_s)
        meter.ended(request, end)
        counts = scrape(metrics, "chairlift:goodput_requests_total", "service_class", "outcome")
        found = [key for key, count in counts.items() if count]
        assert all(service_class == targets.service_class for service_class, _ in found)
        return found[0][1] if found else None

    return judge


def stream(gaps, first_s=0.1):
    """Chunks of one token each."""
    at_s, chunks = first_s, [(first_s, 1, 0)]
    for gap_s in gaps:
        at_s += gap_s
        chunks.append((at_s, 1, 0))
    return chunks


GAP = LatencyTargets(ttft_s=0.5, inter_token_s=0.03, service_class="c")
PACED = LatencyTargets(ttft_s=0.5, inter_token_s=0.03, service_class="c", pacing="paced")


def test_an_answer_in_time_is_met(outcome):
    assert outcome(GAP, stream([0.02] * 50)) == "met"


def test_a_late_first_token_is_missed(outcome):
    assert outcome(GAP, stream([0.02], first_s=0.6)) == "ttft_missed"


def test_a_late_first_token_of_a_class_that_degrades_is_degraded(outcome):
    assert outcome(LatencyTargets(ttft_s=0.5, when_infeasible="degrade"), stream([], first_s=0.6)) == "degraded"


@pytest.mark.parametrize(("num_late", "expected"), [(1, "met"), (3, "itl_missed")])
def test_one_percent_of_the_gaps_may_be_late(outcome, num_late, expected):
    assert outcome(GAP, stream([0.02] * 150 + [0.05] * num_late)) == expected


def test_paced_tokens_make_up_for_later_gaps(outcome):
    assert outcome(PACED, stream([0.01] * 20 + [0.2, 0.2] + [0.01] * 20)) == "met"


def test_paced_tokens_that_fall_behind_are_late(outcome):
    assert outcome(PACED, stream([0.02] * 5 + [0.5] + [0.029] * 20)) == "itl_missed"


def test_the_tokens_of_a_chunk_share_the_time_since_the_chunk_before(outcome):
    assert outcome(GAP, [(0.1, 1, 0), (0.2, 4, 0), (0.3, 4, 0)]) == "met"


def test_gaps_are_those_within_one_answer(outcome):
    chunks = [(0.1 + 0.01 * number, 1, number % 2) for number in range(40)]
    assert outcome(GAP, chunks) == "met"


def test_without_targets_a_complete_answer_is_met(outcome):
    assert outcome(LatencyTargets(service_class="batch"), stream([9.0], first_s=99.0)) == "met"


def test_a_request_without_a_place_is_refused(outcome):
    assert outcome(GAP, end=SHED) == "refused"


@pytest.mark.parametrize("end", [CANCELLED, INVALID])
def test_others_do_not_count_if_they_were_in_time(outcome, end):
    assert outcome(GAP, stream([0.02] * 3), end) is None


def test_a_cancelled_request_counts_if_it_was_late(outcome):
    assert outcome(GAP, stream([0.02] * 3, first_s=0.6), CANCELLED) == "ttft_missed"


def test_tenants_beyond_twenty_share_a_series(metrics, scrape):
    for number in range(25):
        metrics.targets.note_tokens(f"t{number}", 10, 1)
    metrics.targets.note_tokens("t3", 10, 1)
    tokens = scrape(metrics, "chairlift:tenant_tokens_total", "tenant", "kind")
    assert tokens["t3", "prompt"] == 20
    assert tokens["other", "prompt"] == 50
    assert tokens["other", "output"] == 5
    assert len(tokens) == 2 * 21


def test_a_tenant_has_the_tokens_of_its_requests(outcome, metrics, scrape):
    outcome(LatencyTargets(tenant="acme"), stream([0.1, 0.1]))
    tokens = scrape(metrics, "chairlift:tenant_tokens_total", "tenant", "kind")
    assert (tokens["acme", "prompt"], tokens["acme", "output"]) == (7, 3)


def test_every_result_of_a_retry_is_there_from_the_start(metrics, scrape):
    assert scrape(metrics, "chairlift:retry_total", "result") == {result.value: 0 for result in RetryResult}
