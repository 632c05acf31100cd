"""Load of an engine on the wire: with lanes under the policy that has them, without under the others."""

from engine.core.outputs import SchedulerStats
from engine.interfaces import LoopSnapshot
from engine.serving.packing import load_message


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
