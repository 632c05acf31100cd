"""The step-time model: what it predicts, what it learns, what cannot mislead it."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from engine.core.latency.step_time import (
    ERROR_BOUNDS,
    Coefficients,
    StepShape,
    StepTimeErrors,
    StepTimeModel,
    StepTimePrior,
    shape_of,
)
from engine.core.outputs import ScheduledRow, SchedulerOutput
from engine.core.request import RequestId

# An H200 with 8 billion parameters in bfloat16.
TRUTH = StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), knee_tokens=205)


def times(prior: StepTimePrior, factor: float) -> StepTimePrior:
    return StepTimePrior(Coefficients(*(value * factor for value in prior.coefficients)), prior.knee_tokens)


def roofline_s(shape: StepShape) -> float:
    """Memory and arithmetic overlap: not the model's own form."""
    weights_s, gemm_s = 4.2e-3, 20.5e-6 * shape.num_tokens
    return (
        0.6e-3
        + max(weights_s, gemm_s)
        + 0.5e-6 * shape.num_rows
        + 36e-9 * shape.num_kv_tokens
        + (1.37e-9 * shape.num_pairs)
    )


def traffic(rng: random.Random) -> Iterator[tuple[StepShape, float, bool]]:
    """Shapes and durations, with 3 % of noise and a stall of 50 ms in one of 2,000; and whether it is one."""
    num_rows, context = 32, 900
    while True:
        num_rows = max(1, min(256, num_rows + rng.randrange(-4, 5)))
        chunk = rng.choice((0, 0, 0, 64, 256, 512, 1024))
        offset = rng.choice((0, 0, 512, 4096)) if chunk else 0
        shape = StepShape(
            num_rows + chunk, num_rows + (chunk > 0), num_rows * context, chunk * offset + chunk * (chunk + 1) // 2
        )
        is_stall = rng.random() < 1 / 2000
        yield shape, roofline_s(shape) * rng.gauss(1.0, 0.03) + 0.05 * is_stall, is_stall


def learn(model: StepTimeModel, num_steps: int, seed: int = 0) -> int:
    """Observes steps; returns the stalls among them."""
    source, num_stalls = traffic(random.Random(seed)), 0
    for _ in range(num_steps):
        shape, elapsed_s, is_stall = next(source)
        model.observe(shape, elapsed_s)
        num_stalls += is_stall
    return num_stalls


def test_a_prediction_is_the_sum_of_five_terms_with_a_knee() -> None:
    model = StepTimeModel(StepTimePrior(Coefficients(1.0, 2.0, 3.0, 4.0, 5.0), knee_tokens=10))
    assert model.predict_s(StepShape(7, 3, 100, 20)) == 1 + 2 * 10 + 3 * 3 + 4 * 100 + 5 * 20
    assert model.predict_s(StepShape(12, 3, 100, 20)) == 1 + 2 * 12 + 3 * 3 + 4 * 100 + 5 * 20


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_predictions_are_close_after_a_minute_of_steps_even_from_a_wrong_prior(factor: float) -> None:
    model = StepTimeModel(times(TRUTH, factor))
    learn(model, 2000)
    errors = []
    source = traffic(random.Random(1))
    for _ in range(6000):
        shape, elapsed_s, is_stall = next(source)
        if not is_stall:
            errors.append(abs(model.predict_s(shape) - elapsed_s) / elapsed_s)
        model.observe(shape, elapsed_s)
    errors.sort()
    assert errors[int(0.5 * len(errors))] < 0.04
    assert errors[int(0.9 * len(errors))] < 0.10


@pytest.mark.parametrize("shape", [StepShape(1, 1, 500, 0), StepShape(64, 64, 64_000, 0), StepShape(8192, 1, 0, 2**25)])
def test_many_equal_steps_do_not_let_it_diverge(shape: StepShape) -> None:
    rng = random.Random(2)
    model = StepTimeModel(TRUTH)
    before_s = model.predict_s(StepShape(512, 8, 7_000, 130_000))
    for _ in range(100_000):
        model.observe(shape, roofline_s(shape) * rng.gauss(1.0, 0.03))
    assert model.predict_s(shape) == pytest.approx(roofline_s(shape), rel=0.05)
    # What these steps do not show stays near the prior.
    assert model.predict_s(StepShape(512, 8, 7_000, 130_000)) == pytest.approx(before_s, rel=0.3)


def test_it_follows_a_device_that_slows_down_within_a_few_hundred_steps() -> None:
    model = StepTimeModel(TRUTH)
    learn(model, 3000)
    source = traffic(random.Random(3))
    for _ in range(600):
        shape, elapsed_s, _ = next(source)
        model.observe(shape, 2.5 * elapsed_s)
    shape = StepShape(300, 41, 40 * 900, 256 * 129)
    assert model.predict_s(shape) == pytest.approx(2.5 * roofline_s(shape), rel=0.15)


def test_a_stall_is_counted_apart_and_moves_nothing_much() -> None:
    model = StepTimeModel(TRUTH)
    learn(model, 3000)
    shape = StepShape(64, 64, 64 * 900, 0)
    before_s, errors = model.predict_s(shape), model.errors
    model.observe(shape, 0.5)
    assert model.errors == errors._replace(num_stalls=errors.num_stalls + 1)
    assert model.predict_s(shape) == pytest.approx(before_s, rel=0.06)


def test_stalls_are_found_in_traffic_and_a_wrong_prior_is_none() -> None:
    model = StepTimeModel(times(TRUTH, 0.5))
    learn(model, 500, seed=4)
    assert model.errors.num_stalls == 0
    num_stalls = learn(model, 20_000, seed=5)
    assert num_stalls > 3
    assert 0.5 * num_stalls <= model.errors.num_stalls <= num_stalls


def test_errors_are_counted_by_phase() -> None:
    model = StepTimeModel(StepTimePrior(Coefficients(1.0, 0.0, 0.0, 0.0, 0.0)))
    model.observe(StepShape(4, 4, 40, 0), 1.0)
    model.observe(StepShape(20, 4, 40, 0), 1.25)  # predicted about 1.0: an error of 20 %
    errors = model.errors
    assert (sum(errors.decode), sum(errors.prompt), errors.num_stalls) == (1, 1, 0)
    assert errors.decode[0] == 1
    assert (errors.decode_sum, errors.prompt_sum) == (0.0, pytest.approx(0.2))
    prompt = errors.prompt
    assert prompt[ERROR_BOUNDS.index(0.2)] + prompt[ERROR_BOUNDS.index(0.3)] == 1


def test_multipliers_keep_their_bounds() -> None:
    prior = StepTimePrior(Coefficients(1e-3, 1e-5, 1e-6, 1e-8, 1e-9))
    for factor in (100.0, 0.001):
        model = StepTimeModel(prior)
        for _ in range(5000):
            shape = StepShape(300, 44, 40_000, 33_000)
            model.observe(shape, factor * StepTimeModel(prior).predict_s(shape))
        for value, first in zip(model.coefficients, prior.coefficients, strict=True):
            assert 0.25 * first <= value <= 4.0 * first


def test_a_duration_of_zero_is_ignored() -> None:
    model = StepTimeModel(TRUTH)
    model.observe(StepShape(1, 1, 10, 0), 0.0)
    assert model.coefficients == TRUTH.coefficients
    assert model.errors == StepTimeErrors()


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_the_margin_leaves_room_for_the_errors_of_the_device(noise: float) -> None:
    model = StepTimeModel(TRUTH)
    rng = random.Random(5)
    shape = StepShape(64, 64, 64_000, 0)
    duration_s = model.predict_s(shape)
    assert model.margin(3.0) == 1.0
    for _ in range(3000):
        model.observe(shape, duration_s * rng.lognormvariate(0.0, noise))
    assert model.margin(3.0) == pytest.approx(1 / (1 + 3 * noise), rel=0.15)
    assert model.margin(2.0) >= model.margin(3.0)


def test_quantiles_of_errors_are_interpolated() -> None:
    counts = [0] * (len(ERROR_BOUNDS) + 1)
    counts[0], counts[3] = 80, 20  # to 1 %, and from 3 to 5 %
    errors = StepTimeErrors(decode=tuple(counts))
    assert errors.quantile(0.4) == pytest.approx(0.005)
    assert errors.quantile(0.9) == pytest.approx(0.04)
    assert StepTimeErrors().quantile(0.9) == 0.0
    assert errors._replace(prompt=(*[0] * len(ERROR_BOUNDS), 1000)).quantile(0.9) == ERROR_BOUNDS[-1]
    assert all(errors.quantile(low / 100) <= errors.quantile(high / 100) for low, high in pairwise(range(101)))


def test_shape_of_a_plan_counts_contexts_of_narrow_rows_and_pairs_of_wide_ones() -> None:
    rows = (
        ScheduledRow(RequestId(1), 1, 99, (), True),
        ScheduledRow(RequestId(2), 1, 9, (), True),
        ScheduledRow(RequestId(3), 4, 100, (), False),
    )
    assert shape_of(SchedulerOutput(1, (), (), rows, 6)) == StepShape(6, 3, 100 + 10, 101 + 102 + 103 + 104)
    assert shape_of(SchedulerOutput(2, (), (), rows[:2], 2)) == StepShape(2, 2, 100 + 10, 0)
