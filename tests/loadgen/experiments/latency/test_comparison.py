"""Figures of a real run beside those of its twin: the same requests, each counted once on both sides."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from engine.core.latency.step_time import Coefficients, StepTimePrior
from loadgen.experiments.latency.comparison import Counts, compared, comparison_table, largest_error
from loadgen.record import Status
from loadgen.simulation.fleet import FleetOptions, simulate
from loadgen.simulation.policies import parse_policy
from loadgen.simulation.results import Replay, summarize
from loadgen.simulation.workload import requests_of
from tests.support.loadgen.runs import Answered, run_of, with_requests

CLASSES = {"quick": ServiceClass(name="quick", ttft_s=1.0), "batch": ServiceClass(name="batch")}
STEP_S = 0.1
LATE = "RESOURCE_EXHAUSTED: the first token would come after about 2 s, the target is 1 s"


@pytest.fixture
def comparison():
    """30 requests a second apart, of two tokens each: the twin's steps take 0.1 s, the real first tokens 0.125 s."""
    answers = [Answered(float(index), ((index + 0.125, 1), (index + 0.225, 1)), input_tokens=16) for index in range(30)]
    answers[28] = Answered(28.0, sent_s=28.0, ended_s=28.01, status=Status.REFUSED, error=LATE)
    answers[29] = Answered(29.0, ((30.5, 2),))
    run = run_of(answers, ended_s=40.0)
    run = replace(run, settings={**run.settings, "service_classes": [asdict(one) for one in CLASSES.values()]})
    run = with_requests(run, service_class=0)
    options = FleetOptions(
        num_engines=1,
        cost=StepTimePrior(Coefficients(STEP_S, 0.0, 0.0, 0.0, 0.0)),
        policy=parse_policy("fcfs", list(CLASSES.values())),
        kv_cache_tokens=4096,
        max_model_len=1024,
    )
    trace = replace(run.workload, output_tokens=np.full(30, 2))
    requests = requests_of(trace, CLASSES, {"quick": 1.0}, 1)
    replay = Replay(requests, simulate(requests, options, 100.0))
    return compared(2.0, run, (summarize([replay], options, class_names=CLASSES), replay))


def test_requests_are_counted_on_both_sides(comparison):
    assert comparison.real == {"quick": Counts(28, 1, 1, 0), "batch": Counts(0, 0, 0, 0)}
    assert comparison.twin == {"quick": Counts(30, 0, 0, 0), "batch": Counts(0, 0, 0, 0)}
    assert comparison.refusal_ms.tolist() == pytest.approx([10.0])
    assert comparison.given_up_ms.tolist() == []


def test_the_error_is_of_the_twin_relative_to_the_real_figure(comparison):
    figures = {(one.service_class, one.name): one for one in comparison.figures}
    ttft = figures["quick", "TTFT p50"]
    assert (ttft.real, ttft.twin) == (pytest.approx(125.0), pytest.approx(100.0))
    assert ttft.error == pytest.approx(-0.2)
    assert figures["quick", "ITL p50"].error == pytest.approx(0.0, abs=1e-6)
    assert np.isnan(figures["batch", "TTFT p50"].real)


def test_percentiles_of_few_samples_are_shown_but_not_judged(comparison):
    judged = {one.name for one in comparison.figures if one.service_class == "quick" and one.is_judged}
    assert judged == {"TTFT p50", "TTFT p90", "ITL p50", "ITL p90"}
    error, what = largest_error(comparison)
    assert error == pytest.approx(0.2)
    assert what.startswith("quick TTFT p")


def test_the_table_has_every_figure_with_its_error(comparison):
    table = comparison_table([comparison])
    assert "2x of the capacity; 1 refused at once, in p50 10.0 ms" in table
    assert "met, late, refused, failed: 28 1 1 0 (twin 30 0 0 0)" in table
    assert "p50 125 ms, twin 100 -20 %" in table
    assert "(few)" in table
