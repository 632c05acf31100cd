"""The summary: verdict first, then the figures; nothing is hidden."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.checks.selfcheck import judge
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.record import RunData, Status
from loadgen.report.terminal import print_summary
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def _summary(run: RunData, options: MeasureOptions | None = None) -> list[str]:
    metrics = measure(run, options)
    target = io.StringIO()
    print_summary(Console(file=target, width=60), run, metrics, judge(run, metrics), Path("results/x"))
    return target.getvalue().splitlines()


def _figure(lines: list[str], name: str) -> str:
    (found,) = [line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")]
    return found


def test_the_verdict_comes_first_and_says_why() -> None:
    lines = _summary(synthetic_run(100, outcomes={Status.ERROR: 10}))
    assert "Load generator result" in lines[0]
    assert lines[1].startswith("INVALID: ")
    assert " ".join(lines[2:5]).startswith(
        "  INVALID errors, timeouts and unfinished 10 % (limit 0.1 % / 5 %): 10 errors"
    )
    assert lines[-1] == "Results: results/x"


def test_a_valid_run_has_no_reasons() -> None:
    lines = _summary(synthetic_run(1000))
    assert lines[1] == "VALID: the figures may be quoted"
    assert lines[2].startswith("Requests answered:")


def test_an_interrupted_run_says_partial() -> None:
    run = replace(synthetic_run(100, outcomes={Status.UNSENT: 40, Status.IN_FLIGHT: 2}), interrupted=True)
    lines = _summary(run)
    assert "PARTIAL: the run was stopped before its end" in lines
    assert _figure(lines, "Requests answered") == "58 of 100"
    assert (_figure(lines, "Unfinished"), _figure(lines, "Never sent")) == ("2", "40")


def test_figures_are_those_of_the_metrics() -> None:
    run = synthetic_run(300, outcomes={Status.TIMEOUT: 5, Status.DROPPED: 4, Status.CANCELLED: 3})
    options = MeasureOptions(warmup_s=2.0, slo={"ttft": 90.0, "tpot": 12.5}, percentiles=(50.0, 90.0, 99.0))
    metrics = measure(run, options)
    lines = _summary(run, options)
    assert _figure(lines, "Timeouts") == "5"
    assert _figure(lines, "Dropped at --max-concurrency") == "4"
    assert _figure(lines, "Limits") == "TTFT 90 ms, TPOT 12.5 ms"
    goodput = metrics.steady.goodput
    assert _figure(lines, "SLO attainment").endswith(f"{goodput.good:,} of {goodput.offered:,} offered")
    assert any("after 2 s of warm-up to the last arrival" in line for line in lines)
    (heads,) = [line.split() for line in lines if line.split()[:1] == ["mean"]]
    assert heads == ["mean", "p50", "p90", "p99", "max"]
    (ttft,) = [line.split() for line in lines if line.split()[:1] == ["TTFT"]]
    latency = metrics.steady.latencies.ttft
    assert [float(figure) for figure in ttft[1:]] == [
        round(value, 1) for value in (latency.mean, latency.p50, latency.at(90.0), latency.p99, latency.max)
    ]


def test_lines_stay_within_eighty_columns() -> None:
    run = replace(synthetic_run(100, outcomes={Status.ERROR: 10}), interrupted=True)
    options = MeasureOptions(
        slo={"ttft": 90.0, "tpot": 12.5, "itl": 80.0, "e2el": 5000.0}, percentiles=(50.0, 90.0, 95.0, 99.0, 99.9)
    )
    assert max(map(len, _summary(run, options))) <= 80


def test_why_requests_failed_is_told_the_most_frequent_first() -> None:
    texts = [f"INVALID_ARGUMENT: the prompt has {length} tokens" for length in (2000, 3000)]
    texts += ["HTTP 503: away", "HTTP 500: oops", "the stream broke off", "the stream broke off"]
    lines = _summary(run_of([Answered(0.0, status=Status.ERROR, ended_s=1.0, error=text) for text in texts]))
    at = lines.index("Why requests failed:")
    assert lines[at + 1 : at + 5] == [
        "  2 x INVALID_ARGUMENT: the prompt has 2000 to 3000 tokens",
        "  2 x the stream broke off",
        "  1 x HTTP 503: away",
        "  and 1 other cause, see the report",
    ]
    assert not [line for line in _summary(synthetic_run(50)) if line.startswith("Why")]


def test_refusals_for_latency_targets_are_told_apart_from_failures() -> None:
    failed = Answered(0.0, status=Status.ERROR, ended_s=1.0, error="HTTP 503: away")
    refused = Answered(0.0, status=Status.REFUSED, ended_s=1.0, error="HTTP 429: the first token would come after 3 s")
    lines = _summary(run_of([failed, refused, refused]))
    at = lines.index("Why requests failed:")
    assert lines[at : at + 4] == [
        "Why requests failed:",
        "  1 x HTTP 503: away",
        "Why requests were refused:",
        "  2 x HTTP 429: the first token would come after 3 s",
    ]


def test_a_run_without_a_request_still_prints() -> None:
    assert _summary(run_of([]))[1].startswith("INVALID")
    assert _summary(run_of([Answered(0.0, ((0.1, 1),))]))[1].startswith("VALID")


def test_arrivals_are_those_that_were_asked_and_what_did_not_happen_takes_no_line() -> None:
    asked, closed = (
        _summary(synthetic_run(50, settings=settings))
        for settings in ({"asked_rate_per_s": 8.0}, {"closed_loop": True})
    )
    assert _figure(asked, "Arrivals requested") == "8 per s; the plan is a random draw"
    assert _figure(closed, "Arrivals") == "when another request ended (closed loop)"
    absent = ("Arrivals requested", "Timeouts", "Wait in the client", "SLO attainment", "Prompt tokens")
    assert not [line for line in _summary(run_of([Answered(0.0, ((0.1, 1), (0.2, 1)))])) if line.startswith(absent)]
