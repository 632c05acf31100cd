"""result.json keeps its schema, is finite, and has the keys others know."""

import json
import math
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from loadgen.checks.selfcheck import judge
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.plain_json import to_json
from loadgen.record import RunData, Status
from loadgen.report.result import result_document
from tests.support.loadgen.runs import Answered, run_of, synthetic_run

_OPTIONS = MeasureOptions(warmup_s=1.0, slo={"ttft": 100.0, "tpot": 20.0}, percentiles=(50.0, 95.0, 99.9))


def _document(run: RunData, options: MeasureOptions = _OPTIONS) -> dict[str, Any]:
    metrics = measure(run, options)
    found = json.loads(
        to_json(result_document(run, metrics, judge(run, metrics), samples_of(run))), parse_constant=pytest.fail
    )
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "run",
    [
        run_of([]),
        run_of([Answered(0.0, ((0.1, 1),))]),
        run_of([Answered(0.0, ((0.1, 1),)), Answered(0.4, ((0.5, 1), (0.6, 1)))]),
        synthetic_run(5, outcomes={Status.ERROR: 5}),
        synthetic_run(300, shared_block_tokens=64, outcomes={status: 3 for status in Status if status != Status.OK}),
        replace(synthetic_run(50), interrupted=True, server_metrics=("a 1", "a 2")),
        synthetic_run(50, settings={"request_rate": math.inf, "odd": math.nan, "closed_loop": True, "concurrency": 4}),
    ],
    ids=["empty", "one token", "two", "all failed", "every fate", "interrupted", "closed loop"],
)
def test_every_result_keeps_the_schema_and_is_finite(run: RunData) -> None:
    schema = json.loads((files("loadgen.report") / "templates" / "result.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(_document(run))


def test_flat_keys_are_the_nested_figures() -> None:
    run = synthetic_run(
        300,
        outcomes={Status.ERROR: 4, Status.TIMEOUT: 2},
        settings={"time": "2026-01-01T00:00:00+00:00", "api": "grpc"},
    )
    document = _document(run)
    for flat, nested in {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}.items():
        summary = document["metrics"][nested]
        assert document[f"mean_{flat}_ms"] == summary["mean"]
        assert document[f"median_{flat}_ms"] == summary["p50"]
        assert document[f"std_{flat}_ms"] == summary["std"]
        assert [document[f"{p}_{flat}_ms"] for p in ("p50", "p95", "p99", "p99.9")] == [
            summary[p] for p in ("p50", "p95", "p99", "p99.9")
        ]
    assert (document["num_prompts"], document["completed"], document["failed"]) == (300, 294, 6)
    assert document["request_throughput"] == document["throughput"]["requests_per_s"]
    assert document["output_throughput"] == document["throughput"]["output_tokens_per_s"]
    assert document["total_token_throughput"] == pytest.approx(
        document["throughput"]["output_tokens_per_s"] + document["throughput"]["input_tokens_per_s"]
    )
    assert document["request_goodput"] == document["slo"]["requests_per_s"]
    assert document["total_output_tokens"] == run.requests["num_tokens"][run.requests["status"] == Status.OK].sum()
    assert document["total_input_tokens"] == run.workload.input_tokens[run.requests["status"] == Status.OK].sum()
    assert (document["date"], document["backend"]) == ("2026-01-01T00:00:00+00:00", "grpc")


def test_the_window_and_the_whole_run_stand_apart() -> None:
    run = synthetic_run(300)
    document, metrics = _document(run), measure(run, _OPTIONS)
    assert document["metrics"]["ttft_ms"]["n"] == metrics.steady.latencies.ttft.n < 300
    assert document["whole_run"]["metrics"]["ttft_ms"]["n"] == document["whole_run"]["counts"]["ok"] == 300
    assert document["window"] == {"start_s": 1.0, "end_s": metrics.steady.span.end_s, "steady": True, "warmup_s": 1.0}


def test_errors_are_counted_the_most_frequent_first() -> None:
    texts = ("rare", "common", "never", "second")
    played = [Answered(0.1 * i, status=Status.ERROR, error=texts[one]) for i, one in enumerate((0, 1, 3, 1, 3, 1))]
    document = _document(run_of([*played, Answered(1.0, ((1.1, 1),))]))
    assert document["errors"] == [
        {"text": "common", "count": 3}, {"text": "second", "count": 2}, {"text": "rare", "count": 1}
    ]  # fmt: skip


def test_goodput_without_limits_is_null_and_a_burst_has_an_infinite_rate() -> None:
    burst = _document(run_of([Answered(0.0, ((0.1, 1),)), Answered(0.0, ((0.2, 1),))]), MeasureOptions())
    assert burst["request_goodput"] is None
    assert burst["request_rate"] == "inf"
    assert _document(synthetic_run(9, settings={"closed_loop": True}))["request_rate"] is None


def test_verdict_and_errors_are_told() -> None:
    document = _document(synthetic_run(100, outcomes={Status.ERROR: 10}))
    assert document["verdict"]["level"] == "INVALID"
    first = document["verdict"]["reasons"][0]
    assert first.startswith("errors, timeouts and unfinished 10 % (limit 0.1 % / 5 %): 10 errors")
    assert document["errors"] == [{"text": "UNAVAILABLE: the engine is away", "count": 10}]
    (errors,) = [one for one in document["selfcheck"] if one["check"] == "errors"]
    assert (errors["measured"], errors["degraded_above"], errors["invalid_above"]) == (0.1, 0.001, 0.05)
