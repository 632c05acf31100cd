"""Load of an engine on the wire: with lanes under the policy that has them, without under the others."""

from dataclasses import replace

import pytest

from engine.core.latency.step_time import ERROR_BOUNDS, Coefficients, StepShape, StepTimeModel, StepTimePrior
from engine.core.outputs import SchedulerStats
from engine.interfaces import EngineState, LoopSnapshot
from engine.serving.packing import load_message, status_message


def test_load_of_other_policies_has_no_lanes() -> None:
    message = load_message(LoopSnapshot(9, 9, SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)))
    assert not message.lane_tokens
    assert not message.model_coefficients
    assert not message.HasField("min_slack_us")
    assert message.prompt_tokens_per_second == 0


def test_load_of_the_latency_policy_predicts_first_tokens() -> None:
    stats = SchedulerStats(
        1,
        2,
        30,
        *(4, 5, 6, 7, 8, 9, 10),
        prompt_tokens_per_s=1500.0,
        model_coefficients=(0.5, 0.25, 0.125, 0.0, 0.0),
        on_time_tokens=20,
        best_effort_tokens=10,
        min_slack_s=-0.0015,
    )
    message = load_message(LoopSnapshot(9, 9, stats))
    assert message.prompt_tokens_per_second == 1500
    assert list(message.lane_tokens) == [20, 10]
    assert list(message.model_coefficients) == [0.5, 0.25, 0.125, 0, 0]
    assert message.min_slack_us == -1500


def test_status_of_the_latency_policy_has_its_errors_and_decisions() -> None:
    plain = SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert not status_message(EngineState.SERVING, "", LoopSnapshot(9, 9, plain), is_stalled=False).HasField("latency")
    model = StepTimeModel(StepTimePrior(Coefficients(0.01, 0.0, 0.0, 0.0, 0.0)))
    model.observe(StepShape(1, 1, 0, 0), 0.01)  # as predicted
    model.observe(StepShape(8, 1, 0, 0), 0.02)  # twice that
    model.observe(StepShape(1, 1, 0, 0), 10.0)  # a stall
    stats = replace(
        plain, step_time_errors=model.errors, num_infeasible_total=5, num_degraded_total=6, num_itl_infeasible_total=7
    )
    latency = status_message(EngineState.SERVING, "", LoopSnapshot(9, 9, stats), is_stalled=False).latency
    assert tuple(latency.error_bounds) == ERROR_BOUNDS
    assert list(latency.decode_errors) == [1] + [0] * len(ERROR_BOUNDS)
    assert sum(latency.prompt_errors) == latency.prompt_errors[ERROR_BOUNDS.index(0.5)] == 1
    assert (latency.decode_error_sum, latency.num_stalls_total) == (0.0, 1)
    assert latency.prompt_error_sum == pytest.approx(0.5)
    decided = (latency.num_infeasible_total, latency.num_degraded_total, latency.num_itl_infeasible_total)
    assert decided == (5, 6, 7)
