"""What a comparison says in words is what its figures say."""

import json
import math
from dataclasses import replace

import pytest

from loadgen.comparison.bootstrap import Effect
from loadgen.comparison.compare import Comparison, Versus
from loadgen.comparison.contrasts import Compared
from loadgen.measure.metrics import MeasureOptions
from loadgen.plain_json import to_json
from loadgen.report.comparison_text import (
    SAME,
    comparison_document,
    comparison_lines,
    conclusion,
    effect_text,
    good_or_bad,
    interval_text,
    remarks,
)


def ratio(
    value: float, low: float, high: float, *, better: str = "lower", note: str = "", name: str = "TTFT p50"
) -> Compared:
    return Compared(
        "ttft_p50", name, "ms", "ratio", "lower" if better == "lower" else "higher",
        Effect(100.0, 100.0 * value, value, low, high), 12.0, note,
    )  # fmt: skip


def difference(value: float, low: float, high: float) -> Compared:
    return Compared(
        "attainment",
        "Within all limits",
        "share",
        "difference",
        "higher",
        Effect(0.9, 0.9 + value, value, low, high),
        1.0,
    )


def comparison(*figures: Compared, repeats: int = 5, problems: tuple[str, ...] = (), paired: int = 100) -> Comparison:
    versus = Versus("continuous", 100, paired, True, figures)
    return Comparison("static", repeats, (versus,), "0123456789abcdef" * 4, MeasureOptions(), 10_000, problems)


@pytest.mark.parametrize(
    ("figure", "text", "judgement"),
    [
        (ratio(0.877, 0.82, 0.93), "12 % lower", "better"),
        (ratio(1.0123, 1.01, 1.02), "1.2 % higher", "worse"),
        (ratio(1.9, 1.7, 2.2), "90 % higher", "worse"),
        (ratio(3.14159, 2.0, 4.0), "3.14 times as high", "worse"),
        (ratio(0.05, 0.04, 0.06), "95 % lower", "better"),
        (ratio(1.3, 1.1, 1.5, better="higher"), "30 % higher", "better"),
        (ratio(0.7, 0.6, 0.8, better="higher"), "30 % lower", "worse"),
        (ratio(1.3, 0.9, 1.7), SAME, ""),
        (ratio(1.0, 1.0, 1.0), SAME, ""),
        (ratio(1.0, 1.0, 1.2), SAME, ""),  # the interval touches 1
        (ratio(2.0, math.nan, math.nan), "not judged", ""),
        (difference(0.047, 0.01, 0.08), "4.7 points higher", "better"),
        (difference(-0.047, -0.08, -0.01), "4.7 points lower", "worse"),
        (difference(0.0, 0.0, 0.0), SAME, ""),
    ],
)
def test_conclusions(figure: Compared, text: str, judgement: str) -> None:
    assert conclusion(figure) == text
    assert good_or_bad(figure) == judgement
    assert figure.significant == (judgement != "")


def test_no_significant_difference_is_said_in_these_words() -> None:
    lines = "\n".join(line.plain for line in comparison_lines(comparison(ratio(1.3, 0.9, 1.7))))
    assert "no significant difference" in lines
    assert "0.900 to 1.700" in lines
    assert "continuous against static, 5 runs of each" in lines


def test_figures_in_words() -> None:
    assert (effect_text(ratio(1, 1, 1), 1.23456), effect_text(ratio(1, 1, 1), 12.3456)) == ("1.235", "12.3")
    assert effect_text(ratio(1, 1, 1), math.nan) == "-"
    assert interval_text(difference(0.01, -0.012, 0.034)) == "-1.2 pp to +3.4 pp"
    assert interval_text(ratio(1.5, math.nan, math.nan)) == "-"


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (ratio(1.1, 1.05, 1.2), "10 % higher in these runs"),
        (ratio(3.0, 2.0, 4.0), "3 times as high in these runs"),
        (difference(-0.1, -0.2, -0.05), "10.0 points lower in these runs"),
        (ratio(1.1, 0.9, 1.2), SAME),
    ],
)
def test_what_holds_of_these_runs_alone_is_not_said_of_the_servers(figure: Compared, text: str) -> None:
    assert conclusion(replace(figure, of_servers=False)) == text


def test_a_note_that_figures_share_is_said_once() -> None:
    figures = [ratio(1, 1, 1, note="not judged: why", name=name) for name in ("TTFT p99", "TPOT p99")]
    said = remarks(comparison(*figures, ratio(1, 1, 1)).versus[0])
    assert said == ["TTFT p99, TPOT p99: not judged: why"]


def test_the_document_is_plain_and_whole() -> None:
    document = comparison_document(comparison(ratio(2.0, math.nan, math.nan), difference(0.1, 0.05, 0.15)))
    assert json.loads(to_json(document)) == document
    figures = document["versus"][0]["figures"]
    assert figures["ttft_p50"]["low"] is None
    assert (figures["ttft_p50"]["baseline"], figures["ttft_p50"]["other"]) == (100.0, 200.0)
    assert figures["attainment"]["significant"] is True
    assert document["forced"] == []
