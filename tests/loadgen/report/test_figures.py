"""Figures for people: short, with a unit, never NaN."""

import math

import pytest

from loadgen.report.figures import duration, milliseconds, number, percent, share


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1234, "0.12"), (0.01234, "0.012"), (12.34, "12.3"), (123.4, "123"), (12345.6, "12,346"),
     (7.0, "7"), (math.nan, "-")],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (999.94, "999.9"), (1234.5, "1,234"), (math.nan, "-")]
)
def test_milliseconds(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05 ms"), (250.0, "250 ms"), (1500.0, "1.5 s"), (90_000.0, "90 s"), (3.6e6, "60 min"), (math.nan, "-")],
)
def test_duration(value: float, text: str) -> None:
    assert duration(value) == text


def test_share() -> None:
    assert (share(0.5), share(1 / 3), share(math.nan)) == ("50 %", "33.33 %", "-")
    assert (share(1.0), share(0.999999), share(0.0)) == ("100 %", "99.99 %", "0 %")


def test_percent_reads_as_none_or_all_only_where_it_is() -> None:
    texts = [percent(value, 1) for value in (0.0, 1e-9, 0.5, 1999 / 2000, 1.0)]
    assert texts == ["0.0", "0.1", "50.0", "99.9", "100.0"]
