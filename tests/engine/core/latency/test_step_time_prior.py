"""The prior of the step-time model, solved from measured steps."""

import random

import pytest

from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior
from engine.core.latency.step_time_prior import solve_prior

H200 = StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), knee_tokens=205)
CPU = StepTimePrior(Coefficients(8e-3, 1.7e-3, 0.5e-3, 4.3e-6, 1.0e-6), knee_tokens=8)


def chunk(num_tokens: int, offset: int = 0) -> StepShape:
    return StepShape(num_tokens, 1, 0, num_tokens * offset + num_tokens * (num_tokens + 1) // 2)


def rows(num_rows: int, context: int) -> StepShape:
    return StepShape(num_rows, num_rows, num_rows * context, 0)


MEASURED = (
    rows(1, 16), rows(16, 16), rows(64, 16), rows(64, 1000), chunk(16), chunk(64), chunk(256), chunk(512),
    chunk(512, 4096),
)  # fmt: skip
OTHERS = (rows(8, 500), rows(48, 700), chunk(128, 1000), chunk(400, 200), StepShape(300, 45, 44 * 500, 256 * 128))


@pytest.mark.parametrize("truth", [H200, CPU])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_prior_predicts_steps_that_were_not_measured(truth: StepTimePrior, noise: float) -> None:
    rng, model = random.Random(0), StepTimeModel(truth)
    solved = StepTimeModel(
        solve_prior([(shape, model.predict_s(shape) * (1 + rng.uniform(-noise, noise))) for shape in MEASURED])
    )
    for shape in OTHERS:
        assert solved.predict_s(shape) == pytest.approx(model.predict_s(shape), rel=0.05 + 4 * noise), shape


def test_a_knee_is_found() -> None:
    model = StepTimeModel(H200)
    assert 160 <= solve_prior([(shape, model.predict_s(shape)) for shape in MEASURED]).knee_tokens <= 256


def test_a_term_without_effect_is_small_and_positive() -> None:
    prior = solve_prior([(shape, 1e-3 + 1e-5 * shape.num_tokens) for shape in MEASURED])
    assert all(value > 0.0 for value in prior.coefficients)
    model = StepTimeModel(prior)
    for shape in OTHERS:
        assert model.predict_s(shape) == pytest.approx(1e-3 + 1e-5 * shape.num_tokens, rel=0.1)


def test_too_few_samples_and_impossible_durations_are_errors() -> None:
    with pytest.raises(ValueError, match="4 samples, a prior needs at least 5"):
        solve_prior([(shape, 1.0) for shape in MEASURED[:4]])
    with pytest.raises(ValueError, match=r"16 tokens took 0\.0 s"):
        solve_prior([(shape, float(shape.num_tokens != 16)) for shape in MEASURED])
