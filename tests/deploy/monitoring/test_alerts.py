"""The alerts in Prometheus' own evaluation (`promtool test rules`): a healthy pair sets off none, a sick one its own.

The series are those of a page that a frontend exported, an hour long, with the course of some replaced: a value every
ten seconds, in promtool's notation (`0+5x360`: from 0 on, 5 more each time).
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)

FLAT = "0x360"


class Course(NamedTuple):
    """What becomes of some series: the values, in promtool's notation; None: they are not there."""

    name: str
    values: str | None
    applies: Callable[[Mapping[str, str]], bool] = lambda labels: True


def ends(reason: str, values: str) -> Course:
    return Course("chairlift:request_success_total", values, lambda labels: labels["finished_reason"] == reason)


def first_tokens(faster_than_s: float) -> list[Course]:
    """Two requests a second whose first token takes between half of this and this."""
    name = "chairlift:time_to_first_token_seconds"
    return [
        Course(f"{name}_bucket", FLAT, lambda labels: float(labels["le"]) < faster_than_s),
        Course(f"{name}_bucket", "0+20x360", lambda labels: float(labels["le"]) >= faster_than_s),
        Course(f"{name}_count", "0+20x360"),
    ]


HEALTHY = [
    Course("up", "1x360"),
    Course("chairlift:requests_received_total", "0+20x360"),
    ends("stop", "0+15x360"),
    ends("length", "0+5x360"),
    *first_tokens(0.1),
    Course("chairlift:frontend_queue_requests", "3 0 1 2 1 0 4 1x353"),
    Course("chairlift:num_requests_running", "8x360"),
    Course("chairlift:num_requests_waiting", "2x360"),
    Course("chairlift:kv_cache_usage_perc", "0.8x360"),
    Course("chairlift:engine_generated_tokens_total", "100+500x360"),
    Course("chairlift:integrity_checks_total", "0+1x360"),
]
TOLD_BY_ENGINE = (
    "num_requests_running", "num_requests_waiting", "num_waiting_prefill_tokens", "kv_cache_usage_perc",
    "num_preemptions_total", "recomputed_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "engine_generated_tokens_total", "jit_compiles_after_ready_total", "integrity_checks_total",
)  # fmt: skip
NO_TRAFFIC = [Course("chairlift:requests_received_total", FLAT), ends("stop", FLAT), ends("length", FLAT)]
IDLE = [
    *NO_TRAFFIC,
    Course("chairlift:num_requests_running", FLAT),
    Course("chairlift:num_requests_waiting", FLAT),
    Course("chairlift:engine_generated_tokens_total", "7x360"),
]
BUSY = [
    Course("chairlift:kv_cache_usage_perc", "1x360"),
    Course("chairlift:num_requests_running", "64x360"),
    Course("chairlift:frontend_queue_requests", "40x360"),
]
RESTARTED_ONCE = [
    Course("chairlift:engine_up", "1x300 0x3 1x57"),
    Course("chairlift:engine_generated_tokens_total", "0+500x300 _x3 0+500x57"),
    ends("error", "0x300 4x60"),
]
NO_ENGINE = [
    *NO_TRAFFIC,
    Course("chairlift:engine_up", FLAT),
    *(Course(f"chairlift:{name}", None) for name in TOLD_BY_ENGINE),
]
OF_ANOTHER_PROJECT = [  # busy, and its proto has no counters
    *BUSY,
    *(Course(f"chairlift:{name}", None) for name in TOLD_BY_ENGINE if name.endswith("_total")),
]
NEVER_STEPPED = [
    Course("chairlift:engine_generated_tokens_total", FLAT),
    Course("chairlift:num_requests_running", FLAT),
]
THRASHING = [
    Course("chairlift:kv_cache_usage_perc", "1x360"),
    Course("chairlift:num_preemptions_total", "0+1x360"),
]
NAME_WITHOUT_ADDRESS = [*NO_ENGINE, Course("chairlift:engine_up", None)]
COMES_AND_GOES = [Course("chairlift:engine_up", " ".join(["1x10 0x4"] * 22 + ["1x8"]))]  # 50 s of every 160 s away
FIRES: Mapping[str, tuple[list[Course], str | None]] = {
    "healthy": ([], None),
    "idle": (IDLE, None),
    "busy": (BUSY, None),
    "engine of another project": (OF_ANOTHER_PROJECT, None),
    "three errors in ten minutes, and hardly a request": (
        [*NO_TRAFFIC, ends("stop", "0 1x180 2x178"), ends("error", "0x100 1x20 2x20 3x217")],
        None,
    ),
    "loads for five minutes": ([Course("chairlift:engine_up", "1x60 0x30 1x270")], "ChairliftNoEngine"),
    "an engine lost once": ([Course("chairlift:requests_lost_engine_total", "0x100 30x260")], None),
    "two errors in an hour": ([ends("error", "0x100 1x100 2x160")], None),
    "engine restarted once": (RESTARTED_ONCE, None),
    "compiled before anybody looked": ([Course("chairlift:jit_compiles_after_ready_total", "5x360")], None),
    "frontend gone": ([Course("up", FLAT)], "ChairliftNotScraped"),
    "no frontend found": ([Course("up", None)], "ChairliftNotScraped"),
    "no engine": (NO_ENGINE, "ChairliftNoEngine"),
    "name without an address": (NAME_WITHOUT_ADDRESS, "ChairliftNoEngine"),
    "engine comes and goes": (COMES_AND_GOES, "ChairliftEngineFlapping"),
    "loses engines": ([Course("chairlift:requests_lost_engine_total", "0+1x360")], "ChairliftEngineLoss"),
    "errors": ([ends("error", "0+1x360")], "ChairliftErrors"),
    "turned away": ([ends("shed", "0+1x360")], "ChairliftRequestsRejected"),
    "slow first tokens": (first_tokens(20), "ChairliftSlowFirstToken"),
    "queue grows": ([Course("chairlift:frontend_queue_requests", "0+1x360")], "ChairliftQueueGrows"),
    "stalled": ([Course("chairlift:engine_generated_tokens_total", "0+500x300 150000x60")], "ChairliftStalled"),
    "stalled before the first step": (NEVER_STEPPED, "ChairliftStalled"),
    "full and thrashing": (THRASHING, "ChairliftKvCacheFull"),
    "compiled late": ([Course("chairlift:jit_compiles_after_ready_total", "0x300 1x60")], "ChairliftLateKernelCompile"),
    "integrity failure": ([Course("chairlift:integrity_failures_total", "0x200 1x160")], "ChairliftIntegrityFailure"),
}
QUICK = ("healthy", "no engine")  # promtool takes seconds for each


def of_two_engines(page: str) -> str:
    """The page with a second engine beside the first, of which the frontend has said as much."""
    lines = page.splitlines(keepends=True)
    return "".join(line + line.replace('engine="0"', 'engine="1"') * ('engine="0"' in line) for line in lines)


def series_of(page: str, instance: str, courses: list[Course]) -> list[dict[str, str]]:
    """The page's series, and Prometheus' `up`, as promtool's input; the last course that applies counts."""
    scraped = {"job": "chairlift", "instance": instance}
    samples = [("up", {}, 1.0)] + [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    ]
    names = {name for name, _, _ in samples}
    assert {course.name for course in courses} <= names
    found = []
    for name, labels, value in samples:
        values: str | None = f"{value}x360"
        for course in courses:
            if course.name == name and course.applies(labels):
                values = course.values
        if values is not None:
            text = ", ".join(f'{label}="{each}"' for label, each in {**labels, **scraped}.items())
            found.append({"series": f'{{__name__="{name}", {text}}}', "values": values})
    return found


def check_fired(cases: list[list[dict[str, str]]], expected: str | None, monitoring: Path, folder: Path) -> None:
    """Asserts that in each set of series this alert, and no other, has fired within the hour."""
    fired = {
        "expr": 'count by (alertname) (last_over_time(ALERTS{alertstate="firing"}[1h]))',  # now or before
        "eval_time": "1h",
        "exp_samples": [{"labels": f'{{alertname="{expected}"}}', "value": 1}] if expected else [],
    }
    tests = [{"interval": "10s", "input_series": series, "promql_expr_test": [fired]} for series in cases]
    rules = str(monitoring / "prometheus" / "alerts.yml")
    (folder / "test.yml").write_text(  # JSON is YAML, and is written a hundred times as fast
        json.dumps({"rule_files": [rules], "evaluation_interval": "10s", "tests": tests})
    )
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("prefix", ["chairlift"], indirect=True)
@pytest.mark.parametrize(
    "state", [state if state in QUICK else pytest.param(state, marks=pytest.mark.slow) for state in FIRES]
)
def test_alert_fires_when_it_should_and_no_other(page: str, monitoring: Path, tmp_path: Path, state: str) -> None:
    courses, expected = FIRES[state]
    sick = series_of(page, "10.0.0.1:8000", [*HEALTHY, *courses])
    # Another frontend on the same engine, which it may know under another number, and feels nothing.
    well = series_of(page.replace('engine="0"', 'engine="1"'), "10.0.0.2:8000", HEALTHY)
    cases = [sick] if state == "no frontend found" else [sick, sick + well]
    check_fired(cases, expected, monitoring, tmp_path)


@needs_promtool
@pytest.mark.parametrize("prefix", ["chairlift"], indirect=True)
@pytest.mark.parametrize(
    ("course", "expected"), [("1x100 0x259", "ChairliftEngineFlapping"), ("1x100 _x260", None)], ids=["away", "let go"]
)
def test_one_engine_of_two_that_stays_away_is_a_ticket(
    page: str, monitoring: Path, tmp_path: Path, course: str, expected: str | None
) -> None:
    """It is no page; an engine that is removed from its name fires no alert."""
    reported = [Course(f"chairlift:{name}", None, lambda labels: labels["engine"] == "1") for name in TOLD_BY_ENGINE]
    up = Course("chairlift:engine_up", course, lambda labels: labels["engine"] == "1")
    case = series_of(of_two_engines(page), "10.0.0.1:8000", [*HEALTHY, *reported, up])
    check_fired([case], expected, monitoring, tmp_path)


def test_every_alert_is_seen_firing(monitoring: Path) -> None:
    (group,) = yaml.safe_load((monitoring / "prometheus" / "alerts.yml").read_text())["groups"]
    assert {rule["alert"] for rule in group["rules"]} == {expected for _, expected in FIRES.values()} - {None}
