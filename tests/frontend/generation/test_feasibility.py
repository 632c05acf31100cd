"""Requests that cannot be in time are refused with a slot, and come back with a ticket; in virtual time."""

import random

import pytest

from frontend.errors import InvalidRequest, TargetsInfeasible
from frontend.generation.feasibility import Feasibility
from frontend.generation.prompt_size import PromptSize
from frontend.generation.retry_calendar import RetryCalendar
from frontend.generation.retry_ticket import RetryTickets
from frontend.routing.forecast import EngineForecast, FleetForecast
from frontend.types import LatencyTargets, RetryResult

RATE = 1000.0
STEP_S = 0.02
FAST = LatencyTargets(ttft_s=0.5, service_class="fast", when_infeasible="refuse", tenant="acme")
OFFSET_S = 1e9


class Notes:
    def __init__(self):
        self.results = []
        self.errors_s = []

    def note_retry(self, result):
        self.results.append(result)

    def note_prediction(self, error_s):
        self.errors_s.append(error_s)


class World:
    """One engine with `ahead` tokens before every new request."""

    def __init__(self, *, rate=RATE, horizon_s=30.0, min_step_s=0.0, unix_offset_s=lambda: OFFSET_S):
        self.ahead = 0.0
        self.rate = rate
        self.notes = Notes()
        self.min_step_s = min_step_s
        self.calendar = RetryCalendar(horizon_s=horizon_s)
        self.gate = Feasibility(
            self.forecast, RetryTickets(b"k" * 16), self.notes, calendar=self.calendar, unix_offset_s=unix_offset_s
        )

    def forecast(self, due_s, model_name):
        return FleetForecast((EngineForecast(self.rate, self.ahead, STEP_S, self.min_step_s),))

    def expect(self, num_tokens=100, *, now_s=0.0, targets=FAST, ticket="", accepted_at_s=None):
        if ticket:
            targets = LatencyTargets(
                ttft_s=targets.ttft_s,
                service_class=targets.service_class,
                when_infeasible=targets.when_infeasible,
                tenant=targets.tenant,
                retry_ticket=ticket,
            )
        at_s = now_s if accepted_at_s is None else accepted_at_s
        return self.gate.expect(targets, "m", PromptSize(num_tokens=num_tokens), accepted_at_s=at_s, now_s=now_s)

    def refusal(self, num_tokens=100, **options):
        with pytest.raises(TargetsInfeasible) as caught:
            self.expect(num_tokens, **options)
        return caught.value


@pytest.fixture
def world():
    return World()


def test_a_request_that_is_in_time_is_admitted(world):
    assert world.expect().predicted_s == pytest.approx(0.13)


def test_a_prediction_may_fill_90_percent_of_the_target(world):
    world.ahead = 310
    world.gate.forget(world.expect())  # 0.41 s and 1.5 steps: 0.44
    world.ahead = 330
    error = world.refusal()
    assert "the first token would come after about 0.46 s, the target of service class 'fast' is 0.5 s" in error.message


def test_headroom_is_left(world):
    roomy = LatencyTargets(ttft_s=0.5, when_infeasible="refuse", headroom=0.5)
    world.ahead = 80
    world.gate.forget(world.expect(targets=roomy))
    world.ahead = 110
    world.refusal(targets=roomy)


@pytest.mark.parametrize("action", ["wait", "degrade"])
def test_other_classes_are_never_refused(world, action):
    world.ahead = 1e9
    world.expect(targets=LatencyTargets(ttft_s=0.5, when_infeasible=action))


def test_nothing_is_refused_before_the_rate_is_measured():
    world = World(rate=0.0)
    world.ahead = 1e9
    assert world.expect().predicted_s is None


def test_time_that_has_passed_counts(world):
    world.ahead = 300
    world.refusal(now_s=0.1, accepted_at_s=0.0)


def test_requests_of_one_burst_see_each_other(world):
    admitted = [world.expect() for _ in range(4)]
    world.refusal()
    assert world.gate.num_pending == 4
    for expected in admitted:
        world.gate.forget(expected)
    world.expect()


def test_a_later_first_token_is_not_ahead(world):
    for _ in range(10):
        world.expect(targets=LatencyTargets(ttft_s=5.0, when_infeasible="refuse"))
    world.expect()


def test_a_refusal_has_the_slot_when_the_backlog_is_gone(world):
    world.ahead = 2000
    error = world.refusal()  # 2.13 s, 1.63 s too late
    assert error.retry_after_s == pytest.approx(1.75)
    assert error.retry_ticket
    assert world.notes.results == [RetryResult.BOOKED]


def test_a_ticket_admits_where_new_requests_are_refused(world):
    world.ahead = 2000
    errors = [world.refusal() for _ in range(20)]
    world.ahead = 350
    now_s = errors[0].retry_after_s
    world.refusal(now_s=now_s)
    back = world.expect(now_s=now_s, ticket=errors[0].retry_ticket)
    assert back.has_ticket
    world.gate.arrived(back, 0, now_s + 0.4)
    assert world.notes.results[-1] is RetryResult.MET
    assert world.notes.errors_s == [pytest.approx(0.08)]


def test_new_requests_see_booked_tokens_as_load(world):
    world.ahead = 2000
    for _ in range(20):
        world.refusal()
    world.ahead = 0
    world.refusal(now_s=1.6)  # 2 x 100 tokens per slot are booked


def test_a_ticket_is_tested_against_the_queue(world):
    world.ahead = 2000
    first = world.refusal()
    error = world.refusal(now_s=first.retry_after_s, ticket=first.retry_ticket)
    assert error.retry_ticket != first.retry_ticket
    assert world.notes.results == [RetryResult.BOOKED, RetryResult.REFUSED, RetryResult.BOOKED]


def test_beyond_the_horizon_there_is_no_time():
    world = World(horizon_s=2.0)
    world.ahead = 10_000
    error = world.refusal()
    assert (error.retry_after_s, error.retry_ticket) == (None, "")
    assert world.notes.results == [RetryResult.BEYOND_HORIZON]


def test_a_prompt_that_is_too_long_even_alone_gets_no_time(world):
    error = world.refusal(2000)
    assert error.retry_after_s is None
    assert error.message.endswith("it takes 2.03 s without any other request")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"now_s": 0.0}, "retry_ticket is valid in 1.75 s, not yet"),
        ({"now_s": 60.0}, "retry_ticket expired 53.25 s ago"),
        ({"num_tokens": 200}, "retry_ticket is for about 100 prompt tokens, the prompt has about 200"),
        ({"ticket": "AAAA"}, "retry_ticket is no ticket of this server"),
    ],
)
def test_bad_tickets_name_the_field(world, change, message):
    world.ahead = 2000
    error = world.refusal()
    world.ahead = 0
    with pytest.raises(InvalidRequest) as caught:
        world.expect(**({"now_s": error.retry_after_s, "ticket": error.retry_ticket} | change))
    assert caught.value.message.startswith(message)
    assert caught.value.field == "spec.latency_targets.retry_ticket"
    assert world.notes.results[-1] is RetryResult.INVALID
    assert world.gate.num_pending == 0


def test_a_ticket_is_valid_in_a_frontend_that_started_after_the_clock_was_set():
    offset_s = OFFSET_S
    early, late = World(unix_offset_s=lambda: offset_s), World(unix_offset_s=lambda: OFFSET_S + 8)
    offset_s += 8
    early.ahead = 10_000
    error = early.refusal()
    assert late.expect(now_s=error.retry_after_s, ticket=error.retry_ticket).has_ticket


def test_a_used_ticket_is_refused(world):
    world.ahead = 2000
    error = world.refusal()
    world.ahead = 0
    world.expect(now_s=error.retry_after_s, ticket=error.retry_ticket)
    with pytest.raises(InvalidRequest, match="retry_ticket has been used"):
        world.expect(now_s=error.retry_after_s, ticket=error.retry_ticket)


def test_a_redeemed_booking_is_no_load_any_more(world):
    world.ahead = 2000
    error = world.refusal()
    world.ahead = 0
    world.expect(now_s=error.retry_after_s, ticket=error.retry_ticket)
    assert world.calendar.num_bookings == 0


def test_a_prompt_with_far_more_tokens_than_estimated_is_checked_again(world):
    expected = world.gate.expect(FAST, "m", PromptSize(num_chars=400), accepted_at_s=0.0, now_s=0.0)
    assert expected.num_tokens == 100
    with pytest.raises(TargetsInfeasible):
        world.gate.correct(expected, 450, 0.01)


def test_exact_counts_improve_the_estimate(world):
    for _ in range(500):
        expected = world.gate.expect(FAST, "m", PromptSize(num_chars=400), accepted_at_s=0.0, now_s=0.0)
        world.gate.correct(expected, 50, 0.0)
        world.gate.forget(expected)
    assert world.gate.expect(FAST, "m", PromptSize(num_chars=800), accepted_at_s=0.0, now_s=0.0).num_tokens == 100


def test_prefix_hits_are_no_work(world):
    world.ahead = 1000
    world.refusal()
    for _ in range(200):
        hit = world.expect(targets=LatencyTargets(ttft_s=0.5))
        world.gate.arrived(hit, 90, 0.1)
        world.gate.forget(hit)
    world.expect()


def test_a_refusal_by_the_engine_gets_a_slot_too(world):
    expected = world.expect()
    world.ahead = 1000
    error = world.gate.refusal(expected, "the engine says no", 0.3)
    assert error.message == "the engine says no"
    assert error.retry_after_s == pytest.approx(0.7)


def test_targets_below_the_shortest_step_are_impossible():
    world = World(min_step_s=0.004)
    with pytest.raises(InvalidRequest, match=r"inter_token is 0.001 s, a step of the engine takes at least 0.004 s"):
        world.gate.check_possible(LatencyTargets(inter_token_s=0.001, is_own=True))
    with pytest.raises(InvalidRequest, match=r"ttft is 0.001 s"):
        world.gate.check_possible(LatencyTargets(ttft_s=0.001, is_own=True))
    world.gate.check_possible(LatencyTargets(ttft_s=0.001))  # of a class: its clients cannot help it
    world.gate.check_possible(LatencyTargets(ttft_s=0.01, is_own=True))


@pytest.mark.parametrize("seed", range(3))
def test_those_who_come_back_when_told_are_in_time(seed):
    """Three times the load that the engine can take, against a fluid queue in order of arrival."""
    rng = random.Random(seed)
    world = World()
    arrivals = [(rng.random() * 60, index, 200, "") for index in range(900)]
    now_s, waits, told = 0.0, [], 0
    while arrivals:
        arrivals.sort(reverse=True)
        at_s, index, num_tokens, ticket = arrivals.pop()
        world.ahead = max(world.ahead - (at_s - now_s) * RATE, 0.0)
        now_s = at_s
        try:
            expected = world.expect(num_tokens, now_s=now_s, ticket=ticket)
        except TargetsInfeasible as error:
            if ticket:
                waits.append(float("inf"))
            elif error.retry_after_s is not None:
                told += 1
                arrivals.append((now_s + error.retry_after_s, index, num_tokens, error.retry_ticket))
            continue
        world.gate.forget(expected)
        world.ahead += num_tokens
        if ticket:
            waits.append(world.ahead / RATE + 1.5 * STEP_S)
    assert told > 200
    assert len(waits) == told
    assert sum(wait_s <= 0.5 for wait_s in waits) >= 0.95 * told
