"""The page stands alone, can be read by everyone, and says what the metrics say."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from loadgen.checks.selfcheck import judge
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.record import ABSENT, RunData, Status
from loadgen.report.files import pictures
from loadgen.report.html import run_page
from tests.support.loadgen.pages import Page
from tests.support.loadgen.runs import Answered, run_of, synthetic_run, with_requests


def _page(run: RunData, options: MeasureOptions | None = None) -> str:
    metrics, samples = measure(run, options), samples_of(run)
    return run_page(run, metrics, judge(run, metrics), pictures(run, metrics, samples))


def _text(run: RunData, options: MeasureOptions | None = None) -> str:
    """What can be read in the page beside its pictures."""
    metrics = measure(run, options)
    return Page(run_page(run, metrics, judge(run, metrics), ())).text


def _usual() -> RunData:
    return synthetic_run(300, outcomes={Status.ERROR: 4, Status.TIMEOUT: 3}, settings={"target": "http://h:8000/v1"})


@cache
def _usual_page() -> str:
    return _page(_usual(), MeasureOptions(slo={"ttft": 100.0}))


def test_a_page_needs_nothing_else() -> None:
    text = _usual_page()
    Page(text).require_self_contained()
    assert not re.findall(r"https?://|data:[a-z]+/", text.replace("http://h:8000/v1", ""))


def test_the_verdict_is_on_top_and_its_reasons_below_it() -> None:
    words = Page(_usual_page()).text
    places = [
        words.index(part)
        for part in ("DEGRADED", "4 errors, 3 timeouts", "TTFT p50", "The run over time", "Self-check")
    ]
    assert places == sorted(places)
    assert _usual_page().index("<title>DEGRADED: ") < _usual_page().index("<body>")


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_part_of_a_run_is_marked(interrupted: bool) -> None:
    run = replace(synthetic_run(80, outcomes={Status.UNSENT: 20}), interrupted=interrupted)
    assert ("Partial: the run was stopped before its end" in _text(run)) == interrupted


def test_pictures_are_drawings_with_real_text_and_a_description() -> None:
    parsed = Page(_usual_page())
    drawings = [attributes for tag, attributes in parsed.elements if tag == "svg"]
    assert len(drawings) == 5
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in drawings)
    assert "image" not in {tag for tag, _ in parsed.elements}
    for words in ("seconds from the start", "prompt tokens", "Requests per second", "p99.9", "99.9 %"):
        assert words in parsed.text
    assert "Half" not in parsed.text
    assert re.search(r"TTFT: half within [\d.]+ ms, 99 % within", parsed.text)


def test_colours_follow_the_page() -> None:
    text = _usual_page()
    drawn = text[text.index("<svg") : text.rindex("</svg>")]
    assert "var(--blue)" in drawn
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) == set()
    defined = set(re.findall(r"(--[a-z]+):", text[: text.index("</style>")]))
    assert set(re.findall(r"var\((--[a-z]+)\)", text)) <= defined
    assert "prefers-color-scheme: dark" in text


def test_it_can_be_read_on_a_phone_and_tables_have_heads() -> None:
    parsed = Page(_usual_page())
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in parsed.elements
    assert dict(parsed.elements)["html"] == {"lang": "en"}
    heads = [attributes for tag, attributes in parsed.elements if tag == "th"]
    assert heads
    assert all(attributes.get("scope") in ("row", "col") for attributes in heads)


def test_what_others_named_cannot_break_out() -> None:
    evil = "<script>alert(1)</script>"
    run = replace(
        _usual(),
        errors=(evil,),
        settings={"model": evil, "command": evil, "tags": {evil: evil}, "target": evil},
        workload=replace(_usual().workload, name=evil),
    )
    text = _page(run)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_figures_are_those_of_the_metrics() -> None:
    run = _usual()
    options = MeasureOptions(warmup_s=1.0, slo={"ttft": 100.0}, percentiles=(50.0, 97.5))
    metrics = measure(run, options)
    words = _text(run, options)
    assert "p97.5" in words
    assert f"{metrics.steady.latencies.ttft.at(97.5):.1f}" in words
    assert f"{metrics.steady.goodput.good:,} of {metrics.steady.goodput.offered:,} offered" in words
    assert "UNAVAILABLE: the engine is away" in words


def test_the_parts_of_ttft_stand_in_the_table_where_the_server_tells_them() -> None:
    untold = synthetic_run(50)
    told = with_requests(untold, server_queued_us=1000, server_prefill_us=2000)
    some = with_requests(untold, server_queued_us=np.where(np.arange(50) < 25, 1000, ABSENT), server_prefill_us=2000)
    for run, row, sentence in ((told, True, True), (some, True, False), (untold, False, False)):
        words = _text(run)
        assert ("of TTFT, the rest: network, streams, event loops" in words) == row
        assert ("their means add up to its mean" in words) == sentence


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "run",
    [
        run_of([]),
        run_of([Answered(0.0, ((0.1, 1),))]),
        run_of([Answered(0.0, status=Status.ERROR, error="no"), Answered(0.5, status=Status.DROPPED)]),
        run_of([Answered(0.0, ((0.0, 1), (0.0, 1)))]),
        synthetic_run(3, outcomes={Status.ERROR: 3}),
        synthetic_run(1500, rate=200.0, output_tokens=(1, 2)),
        with_requests(synthetic_run(50), server_queued_us=1000, server_prefill_us=2000, server_cached_tokens=7),
        replace(synthetic_run(200, settings={"closed_loop": True}, outcomes={Status.UNSENT: 50}), interrupted=True),
    ],
    ids=["empty", "one token", "nothing answered", "no time at all", "all failed", "many", "server's view", "closed"],
)  # fmt: skip
def test_every_kind_of_run_has_a_page(run: RunData) -> None:
    Page(_page(run)).require_self_contained()


def test_a_page_stays_small_however_long_the_run() -> None:
    assert len(_page(synthetic_run(4000, rate=40.0))) < 700_000
