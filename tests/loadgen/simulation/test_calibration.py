"""The fit recovers known coefficients from a step log."""

import json
import math
import random

import pytest

from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior
from loadgen.errors import OptionError, TraceError
from loadgen.simulation.calibration import fit_steps
from loadgen.simulation.step_log import TimedStep, read_step_log


def random_steps(cost, count=400, noise=0.0, seed=1):
    rng, model, steps = random.Random(seed), StepTimeModel(cost), []
    for _ in range(count):
        rows = rng.randrange(1, 64)
        wide = rng.randrange(0, 3)
        chunks = [rng.randrange(2, 800) for _ in range(wide)]
        offsets = [rng.randrange(0, 4000) for _ in range(wide)]
        pairs = sum(n * start + n * (n + 1) // 2 for n, start in zip(chunks, offsets, strict=True))
        shape = StepShape(rows + sum(chunks), rows + wide, sum(rng.randrange(1, 2000) for _ in range(rows)), pairs)
        steps.append(TimedStep(shape, model.predict_s(shape) * (1 + rng.uniform(-noise, noise))))
    return steps


@pytest.mark.parametrize(
    "cost",
    [
        StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), 256),
        StepTimePrior(Coefficients(42e-3, 1.7e-3, -0.16e-3, 4.3e-6, 1e-6), 0),  # a row is cheaper than a prompt token
        StepTimePrior(Coefficients(5e-3, 1e-3, 2e-3, 0.0, 0.0), 0),
    ],
)
def test_fit_recovers_known_coefficients(cost):
    fit = fit_steps(random_steps(cost))
    assert fit.cost.knee_tokens == cost.knee_tokens
    for found, known in zip(fit.cost.coefficients, cost.coefficients, strict=True):
        assert found == pytest.approx(known, rel=1e-3, abs=1e-9)
    assert (fit.num_training, fit.num_test) == (240, 160)
    assert max(fit.test_error) < 1e-6


def test_disturbed_steps_hardly_move_the_fit_and_the_error_is_stated():
    cost = StepTimePrior(Coefficients(42e-3, 1.7e-3, 0.0, 4.3e-6, 1e-6))
    steps = random_steps(cost, noise=0.05)
    steps = [step._replace(seconds=5 * step.seconds) if index % 20 == 0 else step for index, step in enumerate(steps)]
    fit = fit_steps(steps)
    assert fit.cost.coefficients.token_s == pytest.approx(1.7e-3, rel=0.06)
    assert 0.01 < fit.test_error[0] < 0.05
    assert fit.test_error[2] == pytest.approx(0.8, abs=0.05)  # of a step that took five times as long


def test_noise_is_the_spread_around_the_fit_without_its_stalls():
    cost = StepTimePrior(Coefficients(42e-3, 1.7e-3, 0.0, 4.3e-6, 1e-6))
    rng = random.Random(3)
    steps = [step._replace(seconds=step.seconds * rng.lognormvariate(0.0, 0.1)) for step in random_steps(cost, 2000)]
    steps = [step._replace(seconds=20 * step.seconds) if index % 100 == 0 else step for index, step in enumerate(steps)]
    fit = fit_steps(steps)
    assert fit.noise == pytest.approx(0.1, rel=0.1)
    assert fit.time_ratio == pytest.approx(0.99 + 0.2, rel=0.1)
    mean = sum(StepTimeModel(fit.mean_cost).predict_s(step.shape) for step in steps) * math.exp(fit.noise**2 / 2)
    assert mean == pytest.approx(sum(step.seconds for step in steps), rel=0.05)


def test_a_step_lasts_until_the_next_one_if_requests_are_left(tmp_path):
    path = tmp_path / "steps.jsonl"
    lines = [
        line(1, {"1": 4}, t_ms=100.0, running=1),
        line(2, {"1": 1}, t_ms=113.0, waiting=1),  # 3 ms after the update of the step before
        line(3, {"1": 1}, t_ms=126.0, usage={"1": [4, 0, 3]}),  # idle from here on
        line(4, {"2": 4}, t_ms=900.0, running=1),
        line(5, {"2": 1}, t_ms=905.0, running=1, usage={"2": [4, 0, 2]}),  # planned while the step before ran
        line(1, {"1": 4}, t_ms=50.0, usage={"1": [4, 0, 1]}),  # the engine was started again
    ]
    path.write_text("\n".join(lines))
    steps = read_step_log(path).steps
    assert [round(1e3 * step.seconds, 6) for step in steps] == [13.0, 13.0, 10.0, 10.0, 10.0, 10.0]


def test_too_few_steps_are_refused():
    with pytest.raises(OptionError, match="has 49 steps of known shape, a fit needs at least 50"):
        fit_steps(random_steps(StepTimePrior(Coefficients(1, 1, 1, 1, 1)), 49))


def line(step, scheduled, *, ms=10.0, usage=None, preempted=(), **more):
    return json.dumps(
        {
            "step": step, "t_ms": 0.0, "running": 0, "waiting": 0,
            "schedule_ms": 1.0, "execute_ms": ms - 2.0, "update_ms": 1.0, "scheduled": scheduled,
            "usage": usage or {}, "finished": dict.fromkeys(usage or {}, "MAX_TOKENS"), "preempted": list(preempted),
        } | more
    )  # fmt: skip


def test_shapes_are_counted_from_the_cached_prefix(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(
        "\n".join(
            [
                line(1, {"1": 6}),
                line(2, {"1": 1, "2": 4}),
                line(3, {"1": 1, "2": 1}, usage={"1": [22, 16, 3], "2": [4, 0, 2]}),
                line(3, {}),
                line(4, {"3": 9}),  # the log ends before request 3 does
                line(1, {"1": 5}, usage={"1": [5, 0, 1]}),  # the engine was started again
            ]
        )
    )
    log = read_step_log(path)
    assert log.num_left_out == 1
    assert [step.seconds for step in log.steps] == pytest.approx([0.01] * 4)
    assert [tuple(step.shape) for step in log.steps] == [
        (6, 1, 0, 6 * 16 + 21),
        (5, 2, 23, 10),
        (2, 2, 24 + 5, 0),
        (5, 1, 0, 15),
    ]


def test_steps_of_preempted_requests_and_after_dropped_lines_are_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    usage = {"1": [4, 0, 3], "2": [4, 0, 3], "3": [4, 0, 1]}
    path.write_text(
        "\n".join(
            [
                line(1, {"1": 4, "2": 4}),
                line(2, {"2": 1}, preempted=[1]),
                line(3, {"1": 5}),
                line(4, {"2": 1}, dropped=2),
                line(5, {"3": 4}, usage=usage),
            ]
        )
    )
    log = read_step_log(path)
    assert [step.shape.num_tokens for step in log.steps] == [8, 1, 4]
    assert log.num_left_out == 2


def test_steps_after_a_row_with_drafts_are_left_out(tmp_path):
    """Of three drafts two are wrong: the row after them has fewer tokens before it than were scheduled."""
    path = tmp_path / "steps.jsonl"
    rows = [{"1": 3}, {"1": 3}, {"1": 1}, {"1": 4}, {"1": 1, "2": 3}]
    lines = [line(step, scheduled) for step, scheduled in enumerate(rows, 1)]
    path.write_text("\n".join([*lines, line(6, {"2": 1}, usage={"1": [6, 0, 5], "2": [3, 0, 2]})]))
    log = read_step_log(path)
    assert [tuple(step.shape) for step in log.steps] == [
        (3, 1, 0, 6),
        (3, 1, 0, 15),
        (1, 1, 7, 0),
        (4, 1, 0, 38),
        (1, 1, 4, 0),
    ]
    assert log.num_left_out == 1


def test_requests_that_may_have_begun_in_dropped_lines_are_left_out(tmp_path):
    """The prompt of request 2, 1,000 tokens, was computed in the lines that are missing; request 3 began later."""
    path = tmp_path / "steps.jsonl"
    lines = [
        line(1, {"1": 10}, usage={"1": [10, 0, 1]}),
        line(5, {"2": 1}, dropped=3),
        line(6, {"2": 1}, usage={"2": [1000, 0, 4]}),
        line(7, {"3": 2}),
        line(8, {"3": 1}, usage={"3": [8, 6, 2]}),
    ]
    path.write_text("\n".join(lines))
    log = read_step_log(path)
    assert [tuple(step.shape) for step in log.steps] == [(10, 1, 0, 55), (2, 1, 0, 15), (1, 1, 9, 0)]
    assert log.num_left_out == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "line 1 is no line of --step-log: no field 'step'"),
        ("nonsense", "line 1 is no line of --step-log"),
        (line(1, {"1": "x"}), "line 1 is no line of --step-log"),
        ("[]", "line 1 is no line of --step-log"),
    ],
)
def test_an_error_names_the_line(tmp_path, text, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_step_log(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        read_step_log(tmp_path / "none.jsonl")
