"""The prior of step times, measured on a runner whose steps take a known time."""

import pytest

from engine.core.config import SchedulerConfig
from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior, shape_of
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import RequestId
from engine.startup.step_times import measure_prior

TRUTH = StepTimePrior(Coefficients(2e-3, 4e-5, 1e-5, 2e-7, 3e-9), knee_tokens=0)


class TimedRunner:
    """Moves a clock by what the true model predicts; checks the plans as a real runner relies on them."""

    def __init__(self, config: SchedulerConfig, truth: StepTimePrior) -> None:
        self.config, self.model = config, StepTimeModel(truth)
        self.now_s = 0.0
        self.known: dict[RequestId, tuple[int, ...]] = {}
        self.plans: list[SchedulerOutput] = []
        self.shapes: list[StepShape] = []

    def launch(self, plan: SchedulerOutput) -> None:
        for request_id in plan.removed_request_ids:
            del self.known[request_id]
        for new in plan.new_requests:
            assert len(new.token_ids) <= self.config.max_model_len
            self.known[new.request_id] = new.block_ids
        blocks = [block for block_ids in self.known.values() for block in block_ids]
        assert len(set(blocks)) == len(blocks)
        assert not blocks or max(blocks) < self.config.num_blocks
        for row in plan.rows:
            num_slots = len(self.known[row.request_id]) * self.config.block_size
            assert row.num_computed_tokens + row.num_scheduled_tokens <= min(num_slots, self.config.max_model_len)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        if plan.rows:
            self.shapes.append(shape_of(plan))
            self.now_s += self.model.predict_s(shape_of(plan))
        self.plans.append(plan)

    def collect(self) -> ModelRunnerOutput:
        plan = self.plans.pop()
        return ModelRunnerOutput(plan.step, tuple(1 if row.samples else -1 for row in plan.rows), {}, {})


def limits(**changes: int) -> SchedulerConfig:
    fields = {"num_blocks": 512, "max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 2048, **changes}
    return SchedulerConfig(**fields)


def test_the_measured_prior_predicts_steps_like_the_truth_and_the_runner_is_left_empty() -> None:
    runner = TimedRunner(limits(), TRUTH)
    prior = measure_prior(runner, runner.config, 100, lambda: runner.now_s)
    assert prior is not None
    assert not runner.known
    for shape in (StepShape(10, 10, 5000, 0), StepShape(300, 45, 20_000, 33_000), StepShape(512, 1, 0, 600_000)):
        assert StepTimeModel(prior).predict_s(shape) == pytest.approx(runner.model.predict_s(shape), rel=0.03)


def test_shapes_vary_in_rows_contexts_chunks_and_offsets() -> None:
    runner = TimedRunner(limits(), TRUTH)
    measure_prior(runner, runner.config, 100, lambda: runner.now_s)
    decodes = [shape for shape in runner.shapes if shape.num_pairs == 0]
    assert {shape.num_rows for shape in decodes} == {1, 8, 32}
    assert max(shape.num_kv_tokens for shape in decodes) > 32 * 200
    chunks = {shape.num_tokens for shape in runner.shapes if shape.num_pairs}
    assert chunks == {16, 32, 64, 128, 256, 512}
    assert max(shape.num_pairs for shape in runner.shapes) > 512 * 1500


def test_chunks_stop_growing_when_a_step_takes_half_a_second() -> None:
    slow = StepTimePrior(Coefficients(*(100 * value for value in TRUTH.coefficients)))
    runner = TimedRunner(limits(), slow)
    measure_prior(runner, runner.config, 100, lambda: runner.now_s)
    assert max(shape.num_tokens for shape in runner.shapes) == 128  # takes 0.7 s, 64 tokens 0.46 s


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1, "num_blocks": 4, "max_model_len": 64},
        {"max_num_seqs": 64, "num_blocks": 128, "max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_model_len": 8},
    ],
)
def test_tight_limits_are_kept(changes: dict[str, int]) -> None:
    runner = TimedRunner(limits(**changes), TRUTH)
    prior = measure_prior(runner, runner.config, 100, lambda: runner.now_s)
    assert prior is None or min(prior.coefficients[:3]) > 0.0
    assert not runner.known
