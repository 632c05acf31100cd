"""The device as the policy `slo` sees it, and what it reports."""

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.latency.step_time import StepTimeModel
from tests.support.engine.latency_world import H200, REFUSE, World, overload, quantile


def test_a_stall_costs_no_request_its_place_and_is_counted() -> None:
    model = StepTimeModel(H200)
    world = World(lambda shape: model.predict_s(shape) + 0.15 * (len(world.steps) == 300))
    world.add(1, 100, max_tokens=1000, ttft_s=1.0, inter_token_s=0.03)
    world.run()
    stats = world.scheduler.stats()
    assert stats.num_stalls == 1
    assert stats.step_time_errors is not None
    assert stats.step_time_errors.quantile(0.99) < 0.02
    pace = world.requests[1].pace
    assert pace is not None
    assert pace.is_timed


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_stall_refuses_none_of_those_that_came_during_it(max_steps_in_flight: int) -> None:
    model = StepTimeModel(H200)
    world = World(
        lambda shape: model.predict_s(shape) + 0.5 * (len(world.steps) == 300), max_steps_in_flight=max_steps_in_flight
    )
    world.add(1, 100, max_tokens=1000)
    while not world.steps or world.steps[-1][0] < 0.5:
        before_s = world.now_s
        world.step()
    while world.now_s < before_s + 0.5:
        world.step()
    world.add(2, 500, ttft_s=0.3, when_infeasible=REFUSE, arrival_s=world.now_s - 0.2)
    world.run()
    assert world.reason(2) is EndReason.MAX_TOKENS
    assert world.ttft_s(2) < 0.3


def test_a_device_that_is_lastingly_slower_than_the_model_allows_is_measured_and_more_is_refused() -> None:
    model = StepTimeModel(H200)
    world = World(lambda shape: model.predict_s(shape) * (6.0 if world.now_s > 10.0 else 1.0))
    world.run(overload(world, rate=40.0, duration_s=30.0))
    for start_s, end_s, least in ((2.0, 10.0, 0.95), (13.0, 30.0, 0.05)):
        numbers = [n for n, request in world.requests.items() if start_s < request.arrival_s < end_s]
        served = [n for n in numbers if world.reason(n) is EndReason.MAX_TOKENS]
        assert least * len(numbers) < len(served)
    late = [n for n in served if world.ttft_s(n) > 0.45]
    assert len(served) < 0.3 * len(numbers)
    assert len(late) < 0.5 * len(served)


@pytest.mark.parametrize("num_output_tokens", [1, 2000])  # idle afterwards, or without prompts
def test_the_rate_of_a_stall_is_not_reported_until_prompts_wait_again(num_output_tokens: int) -> None:
    model = StepTimeModel(H200)
    world = World(lambda shape: model.predict_s(shape) + 5.0 * (shape.num_tokens > 64))
    world.add(1, 12_000, max_tokens=num_output_tokens)
    while world.scheduler.stats().on_time_tokens + world.scheduler.stats().best_effort_tokens:
        world.step()
    assert 0.0 < world.scheduler.stats().prompt_tokens_per_s < 2000.0 or num_output_tokens == 1
    world.run(until_s=world.now_s + 3.0)
    assert world.scheduler.stats().num_running == (num_output_tokens > 1)
    assert world.scheduler.stats().prompt_tokens_per_s > 20_000.0


def test_two_steps_in_flight_leave_a_first_token_no_later_than_promised() -> None:
    world = World(max_steps_in_flight=2)
    world.run(overload(world, rate=80.0))
    served = [number for number in world.ends if world.reason(number) is EndReason.MAX_TOKENS]
    assert len(served) > 350
    assert quantile((world.ttft_s(number) for number in served), 0.95) <= 0.42


def test_a_prompt_that_the_last_step_admitted_is_backlog() -> None:
    world = World()
    world.add(1, 12_000, ttft_s=50.0)
    num_left = 12_000 - world.step()[1]
    assert num_left > 0
    assert world.scheduler.stats().on_time_tokens == num_left
    assert world.scheduler.stats().prompt_tokens_per_s > 0.0


def test_stats_report_the_model_the_rate_and_the_backlog_by_lane() -> None:
    world = World(max_step_s=0.02)
    world.add(1, 5000, ttft_s=5.0)
    world.add(2, 3000)
    world.add(3, 100, max_tokens=1000, ttft_s=1.0, inter_token_s=0.03)
    world.step()
    world.step()
    stats = world.scheduler.stats()
    assert stats.on_time_tokens + stats.best_effort_tokens == stats.num_waiting_prefill_tokens
    assert 2950 < stats.best_effort_tokens <= 3000
    assert 3000 < stats.on_time_tokens < 5000
    assert 25_000 < stats.prompt_tokens_per_s < 50_000
    assert stats.model_coefficients == pytest.approx(H200.coefficients, rel=0.2)
    assert stats.min_slack_s == pytest.approx(0.03)
    world.run()
    assert world.scheduler.stats().min_slack_s is None


def test_other_policies_report_no_model() -> None:
    stats = World(policy="fcfs").scheduler.stats()
    assert (stats.model_coefficients, stats.step_time_errors, stats.prompt_tokens_per_s) == ((), None, 0.0)
