"""When tokens are due, what counts as late, and when targets are lost."""

import math
from collections.abc import Callable

import pytest

from engine.core.latency.pacing import Lane, Pace, pace_of, slack_of
from engine.core.latency.targets import LatencyTargets, Pacing
from engine.core.request import Request

MakeRequest = Callable[..., Request]
NUM_TOKENS = 300  # of which 2 % are 6


def started(make_request: MakeRequest, pacing: Pacing, gap_s: float = 0.1) -> Pace:
    pace = pace_of(
        make_request(1, 5, targets=LatencyTargets(ttft_s=1.0, inter_token_s=gap_s, pacing=pacing), arrival_s=10.0)
    )
    assert pace.lane is Lane.ON_TIME
    assert (pace.due_s, pace.key, pace.next_due_s) == (11.0, 11.0, math.inf)
    pace.note_token(10.5, NUM_TOKENS)
    return pace


def test_a_request_without_targets_is_best_effort_by_age_and_length(make_request: MakeRequest) -> None:
    pace = pace_of(make_request(1, 5, arrival_s=10.0, waited_s=4.0))
    assert (pace.lane, pace.key, pace.is_timed) == (Lane.BEST_EFFORT, pytest.approx(6.0 + 0.02 * 5), False)
    long, short = (pace_of(make_request(1, n, arrival_s=at_s)) for n, at_s in ((1000, 0.0), (500, 9.0)))
    assert short.key < long.key  # it came 9 s later, 500 tokens are 10 s
    assert pace_of(make_request(1, 500, arrival_s=11.0)).key > long.key


def test_with_an_inter_token_target_alone_it_waits_as_best_effort_and_is_timed_when_it_runs(
    make_request: MakeRequest,
) -> None:
    pace = pace_of(make_request(1, 5, targets=LatencyTargets(inter_token_s=0.1)))
    assert pace.lane is Lane.BEST_EFFORT
    pace.note_token(7.0, NUM_TOKENS)
    assert pace.next_due_s == pytest.approx(7.1)


def test_a_first_token_that_is_late_makes_it_best_effort(make_request: MakeRequest) -> None:
    pace = pace_of(make_request(1, 5, targets=LatencyTargets(ttft_s=1.0, inter_token_s=0.1)))
    pace.note_token(1.01, NUM_TOKENS)
    assert (pace.lane, pace.is_timed, pace.next_due_s) == (Lane.BEST_EFFORT, False, math.inf)


def test_with_a_first_token_target_alone_nothing_is_due_afterwards(make_request: MakeRequest) -> None:
    pace = pace_of(make_request(1, 5, targets=LatencyTargets(ttft_s=1.0)))
    pace.note_token(0.9, NUM_TOKENS)
    assert (pace.lane, pace.is_timed, pace.next_due_s) == (Lane.ON_TIME, False, math.inf)


def test_under_gap_the_next_token_is_due_a_gap_after_the_last(make_request: MakeRequest) -> None:
    pace = started(make_request, Pacing.GAP)
    pace.note_token(10.51, NUM_TOKENS)
    assert pace.next_due_s == pytest.approx(10.61)


def test_under_paced_early_tokens_are_saved_up_to_a_bank(make_request: MakeRequest) -> None:
    pace = started(make_request, Pacing.PACED)
    assert pace.next_due_s == pytest.approx(10.5 + 0.85 * 0.1)
    now_s = 10.5
    for k in range(1, 40):  # ever earlier than due
        now_s += 0.05
        pace.note_token(now_s, NUM_TOKENS)
        due_s = 10.5 + (k + 1) * 0.1 - min(1.5, 0.15 * (k + 1)) * 0.1
        assert pace.next_due_s == pytest.approx(due_s)
    assert pace.num_late == 0
    pace.note_token(10.5 + 40 * 0.1 - 0.01, NUM_TOKENS)  # all saved time is spent, in time
    assert pace.num_late == 0
    pace.note_token(10.5 + 41 * 0.1 + 0.01, NUM_TOKENS)
    assert pace.num_late == 1


def test_after_a_late_token_the_schedule_catches_up_at_twice_the_pace_at_most(make_request: MakeRequest) -> None:
    pace = started(make_request, Pacing.PACED)
    pace.note_token(11.5, NUM_TOKENS)
    assert pace.next_due_s == pytest.approx(11.55)


def test_under_paced_too_many_late_tokens_lose_the_targets(make_request: MakeRequest) -> None:
    pace, now_s = started(make_request, Pacing.PACED), 10.5
    for _ in range(300):
        now_s += 0.09
        pace.note_token(now_s, NUM_TOKENS)
    for num_late in range(1, 7):
        now_s += 10.0
        pace.note_token(now_s, NUM_TOKENS)
        assert pace.num_late == num_late
        assert pace.is_timed
    pace.note_token(now_s + 10.0, NUM_TOKENS)
    assert (pace.lane, pace.is_timed) == (Lane.BEST_EFFORT, False)


class Stream:
    """A stream under `gap` with a target of 0.1 s."""

    def __init__(self, make_request: MakeRequest) -> None:
        self.pace, self.now_s, self.num_tokens = started(make_request, Pacing.GAP), 10.5, 1

    def note(self, *gaps_s: float) -> None:
        """Notes tokens that come with these gaps."""
        for gap_s in gaps_s:
            self.now_s += gap_s
            self.num_tokens += 1
            self.pace.note_token(self.now_s, self.num_tokens)


@pytest.mark.parametrize(("late_s", "relaxed_s"), [(0.11, 0.22), (0.101, 0.202), (0.15, 0.3), (0.9, 0.4)])
def test_under_gap_a_target_is_relaxed_before_the_stream_limits_no_step(
    make_request: MakeRequest, late_s: float, relaxed_s: float
) -> None:
    stream = Stream(make_request)
    pace = stream.pace
    stream.note(*[0.09] * 300)
    for gap_s, comes_after_s in ((0.1, late_s), (relaxed_s, 5.0)):
        for num_late in range(1, 17):
            stream.note(comes_after_s)
            assert (pace.gap_s, pace.num_late, pace.is_timed) == (pytest.approx(gap_s), num_late, True)
        stream.note(comes_after_s)
        assert pace.lane is Lane.BEST_EFFORT
    assert (pace.is_timed, pace.next_due_s) == (False, math.inf)


def test_a_target_counts_again_after_a_slow_spell(make_request: MakeRequest) -> None:
    stream = Stream(make_request)
    pace = stream.pace
    stream.note(*[0.15] * 17)
    stream.note(*[0.15] * 128)  # in time for the relaxed target
    assert pace.gap_s == pytest.approx(0.3)
    stream.note(0.15)
    assert pace.gap_s == 0.1
    assert pace.next_due_s == pytest.approx(stream.now_s + 0.1)
    stream.note(*[0.15] * 16)
    assert pace.gap_s == 0.1
    stream.note(0.15)
    assert (pace.gap_s, pace.is_timed) == (pytest.approx(0.3), True)


@pytest.mark.parametrize(("num_in_time", "is_kept"), [(1, True), (0, False)])
def test_under_gap_a_stream_misses_its_target_only_if_most_of_its_tokens_are_late(
    make_request: MakeRequest, num_in_time: int, is_kept: bool
) -> None:
    stream = Stream(make_request)
    stream.note(*[0.3, *[0.05] * num_in_time] * 50)
    assert (stream.pace.gap_s == 0.1) is is_kept


@pytest.mark.parametrize("pacing", Pacing)
def test_time_that_the_client_paused_it_is_not_late(make_request: MakeRequest, pacing: Pacing) -> None:
    pace = started(make_request, pacing)
    pace.resume(100.0)
    pace.note_token(100.09, NUM_TOKENS)
    assert pace.num_late == 0
    assert 100.1 < pace.next_due_s <= 100.2


def test_a_request_that_moved_in_the_middle_of_an_answer_is_due_at_once_and_has_begun(
    make_request: MakeRequest,
) -> None:
    targets = LatencyTargets(ttft_s=0.0, inter_token_s=0.1)
    pace = pace_of(make_request(1, 5, output_ids=[1, 2], targets=targets, arrival_s=10.0, has_moved=True))
    assert (pace.lane, pace.is_judged) == (Lane.ON_TIME, True)
    pace.note_token(12.0, NUM_TOKENS)
    assert pace.is_timed  # one late token
    without = pace_of(make_request(2, 5, output_ids=[1, 2], arrival_s=10.0, has_moved=True))
    assert without.key < pace_of(make_request(3, 5, arrival_s=0.0)).key


def test_the_tightest_request_bounds_the_step_with_caution_by_its_pacing(make_request: MakeRequest) -> None:
    requests = []
    for number, (pacing, gap_s) in enumerate(((Pacing.GAP, 0.2), (Pacing.PACED, 0.2), (Pacing.GAP, 9.0))):
        request = make_request(number, 5, num_computed_tokens=100 + number)
        request.pace = started(make_request, pacing, gap_s)
        requests.append(request)
    requests[1].pace.next_due_s = 10.7
    requests.append(make_request(9, 5, num_computed_tokens=7))
    slack = slack_of(requests, 10.6, is_ahead=False)
    assert slack.allowed_s == pytest.approx(0.1 * 0.85)
    assert slack.min_slack_s == pytest.approx(0.1)
    assert slack.min_gap_s == 0.2
    assert slack.num_kv_tokens == 310
    assert slack_of(requests[1:2], 10.6, is_ahead=False).allowed_s == pytest.approx(0.1 * 0.93)
    assert slack_of(requests[3:], 10.6, is_ahead=False).allowed_s == math.inf


def test_a_step_uses_less_slack_if_predictions_err(make_request: MakeRequest) -> None:
    for pacing, safety, margins, share in (
        (Pacing.GAP, 0.85, (0.7, 0.1), 0.7),
        (Pacing.GAP, 0.85, (0.9, 0.1), 0.85),
        (Pacing.PACED, 0.93, (0.1, 0.8), 0.8),
    ):
        request = make_request(1, 5)
        request.pace = started(make_request, pacing, 0.2)
        plain = slack_of([request], 10.5, is_ahead=False)
        careful = slack_of([request], 10.5, is_ahead=False, margins=margins)
        assert careful.allowed_s == pytest.approx(plain.allowed_s / safety * share)
        assert careful.min_slack_s == plain.min_slack_s


@pytest.mark.parametrize(("pacing", "slack_s"), [(Pacing.GAP, 0.2), (Pacing.PACED, 0.1 + 0.17)])
def test_with_a_step_in_flight_the_token_after_the_next_is_planned(
    make_request: MakeRequest, pacing: Pacing, slack_s: float
) -> None:
    request = make_request(1, 5, num_pending_tokens=2)
    request.pace = started(make_request, pacing, 0.2)
    # The step in flight ends at 10.6. Under gap that token decides when the next one is due.
    assert slack_of([request], 10.6, is_ahead=True).min_slack_s == pytest.approx(slack_s)
    request.num_pending_tokens = 1  # no row in the step in flight
    assert slack_of([request], 10.6, is_ahead=True).min_slack_s == pytest.approx(request.pace.next_due_s - 10.6)
