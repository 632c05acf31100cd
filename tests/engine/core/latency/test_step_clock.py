"""When steps start and end, and how fast the engine is taken to be."""

import pytest

from engine.core.latency.step_clock import StepClock
from engine.core.latency.step_time import Coefficients, StepShape, StepTimePrior

PRIOR = StepTimePrior(Coefficients(1.0, 0.01, 0.0, 0.0, 0.0))
DECODE, PROMPT, EMPTY = StepShape(1, 1, 100, 0), StepShape(101, 1, 0, 5050), StepShape(0, 0, 0, 0)


@pytest.fixture
def clock() -> StepClock:
    return StepClock(PRIOR)


def test_a_step_starts_when_those_in_flight_are_expected_to_end(clock: StepClock) -> None:
    assert clock.start_s(5.0) == 5.0
    clock.plan(DECODE, 5.0, has_backlog=False)
    assert clock.start_s(5.5) == pytest.approx(6.01)
    assert clock.start_s(7.0) == 7.0  # the step is overdue
    clock.plan(PROMPT, 5.5, has_backlog=False)
    assert clock.start_s(5.5) == pytest.approx(6.01 + 2.01)
    clock.collect(6.5, 0)  # later than expected, and so is the next one
    assert clock.start_s(6.5) == pytest.approx(6.5 + 2.01)
    clock.collect(8.0, 0)
    assert not clock.has_steps
    assert clock.start_s(8.0) == 8.0


def test_with_two_steps_in_flight_the_second_is_timed_from_the_end_of_the_first(clock: StepClock) -> None:
    clock.plan(DECODE, 0.0, has_backlog=False)
    clock.plan(PROMPT, 0.1, has_backlog=True)
    clock.collect(1.0, 0)
    clock.collect(3.0, 0)
    assert clock.prompt_tokens_per_s(3.0, 0.7) == pytest.approx(100 / 2.0)


def test_rates_are_measured_while_prompts_wait_only(clock: StepClock) -> None:
    clock.plan(PROMPT, 0.0, has_backlog=False)
    clock.collect(2.0, 0)
    assert clock.prompt_tokens_per_s(2.0, 0.7) == 0.0
    assert clock.expected_pace(2.0, 9.0, 0.7) == (0.7, 2.0)
    clock.plan(PROMPT, 2.0, has_backlog=True)
    clock.collect(4.0, 4)
    assert clock.prompt_tokens_per_s(4.0, 0.7) == 50.0
    assert clock.expected_pace(4.0, 9.0, 0.7) == (0.5, 2.0)  # 100 tokens of 10 ms in 2 s
    assert clock.ends_per_s is not None


def test_the_speed_counts_attention() -> None:
    clock = StepClock(StepTimePrior(Coefficients(1.0, 0.01, 0.0, 0.0, 0.001)))
    clock.plan(PROMPT, 0.0, has_backlog=True)
    clock.collect(10.0, 0)
    assert clock.expected_pace(10.0, 9.0, 0.7)[0] == pytest.approx((100 * 0.01 + 5050 * 0.001) / 10.0)


def test_old_measurements_are_not_kept(clock: StepClock) -> None:
    clock.plan(PROMPT, 0.0, has_backlog=True)
    clock.collect(50.0, 0)
    assert clock.expected_pace(50.5, 0.1, 0.7) == pytest.approx((1.0 / 50.0, 2.01))  # the next step need not stall
    assert clock.expected_pace(60.0, 0.1, 0.7) == (0.7, 0.1)
    assert clock.prompt_tokens_per_s(50.5, 0.7) == 2.0
    assert clock.prompt_tokens_per_s(60.0, 0.7) == pytest.approx(0.7 / 0.01, rel=0.1)
    for now_s in range(60, 80):
        clock.plan(DECODE, float(now_s), has_backlog=False)
        clock.collect(now_s + 1.0, 0)  # the engine runs, but no prompt waits
    assert clock.expected_pace(80.0, 0.1, 0.7) == (pytest.approx(0.7, rel=0.01), 1.0)
    for now_s in range(80, 100, 2):
        clock.plan(DECODE, float(now_s), has_backlog=False)
        clock.collect(now_s + 2.0, 0)  # at half the speed of the model, which follows slowly
    assert 0.3 < clock.expected_pace(100.0, 0.1, 0.7)[0] < 0.5


def test_each_step_is_learned_once_and_steps_without_rows_are_not(clock: StepClock) -> None:
    clock.plan(DECODE, 0.0, has_backlog=False)
    clock.collect(1.0, 0)
    clock.learn()
    clock.learn()
    clock.plan(EMPTY, 1.0, has_backlog=False)
    clock.collect(5.0, 0)
    clock.learn()
    assert sum(clock.model.errors.decode) == 1
    clock.plan(DECODE, 5.0, has_backlog=False)
    clock.collect(6.0, 0)
    clock.plan(DECODE, 6.0, has_backlog=False)
    clock.collect(7.0, 0)  # learns the one before
    assert sum(clock.model.errors.decode) == 2
