"""Ladders of loads, and what is said of those that make no sense."""

from itertools import pairwise

import pytest

from loadgen.errors import OptionError
from loadgen.sweep.rates import ladder


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("4", (4,)),
        ("1,2,4", (1, 2, 4)),
        (" 0.5 , 1.25", (0.5, 1.25)),
        ("1:8:+1", (1, 2, 3, 4, 5, 6, 7, 8)),
        ("1:8:x2", (1, 2, 4, 8)),
        ("1:10:x2", (1, 2, 4, 8)),
        ("1:1000:x10", (1, 10, 100, 1000)),  # log(1000) / log(10) is not 3
        ("0.1:0.5:+0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),  # 0.1 + 0.1 + 0.1 is not 0.3
        ("1:3:x1.1", (1, 1.1, 1.21, 1.331, 1.464, 1.611, 1.772, 1.949, 2.144, 2.358, 2.594, 2.853)),
        ("5:5:x2", (5,)),
        ("3:4:+9", (3,)),
    ],
)
def test_a_ladder_of_rates(text: str, loads: tuple[float, ...]) -> None:
    assert ladder(text, "--rates") == loads


def test_the_ladder_of_the_documentation() -> None:
    rates = ladder("1:64:x1.5", "--rates")
    assert len(rates) == 11
    assert rates[-1] == 57.67
    assert all(high / low == pytest.approx(1.5, rel=1e-3) for low, high in pairwise(rates))


@pytest.mark.parametrize(
    ("text", "loads"), [("1:16:x1.3", (1, 2, 3, 4, 5, 6, 8, 11, 14)), ("1,2,8", (1, 2, 8)), ("2:8:+2", (2, 4, 6, 8))]
)
def test_concurrencies_are_whole(text: str, loads: tuple[float, ...]) -> None:
    assert ladder(text, "--concurrencies", whole=True) == loads


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not a number"),
        ("fast", "'fast' is not a number"),
        ("1,,2", "'' is not a number"),
        ("1,2,", "'' is not a number"),
        ("0,1", "0 must be above 0"),
        ("-1:4:+1", "-1 must be above 0"),
        ("inf", "inf must be above 0 and finite"),
        ("nan,2", "nan must be above 0"),
        ("4,2", "2 does not rise above 4"),
        ("2,2", "2 does not rise above 2"),
        ("1.00001,1.00002", "1 does not rise above 1"),
        ("1:64", "must look like"),
        ("1:64:1.5", "must look like"),
        ("1:64:x1.5:x2", "must look like"),
        ("1:64:", "must look like"),
        (":64:x2", "'' is not a number"),
        ("1:64:x", "'' is not a number"),
        ("1:64:xx2", "'x2' is not a number"),
        ("64:1:x2", "64 is above 1"),
        ("1:64:x1", "a factor of 1 never gets to 64"),
        ("1:64:x0.5", "a factor of 0.5 never gets to 64"),
        ("1:64:+0", "0 must be above 0"),
        ("1:64:+-1", "-1 must be above 0"),
        ("1:1000:+1", "makes 1000 load levels, 100 at most"),
        ("1:1e300:x1.0001", "load levels, 100 at most"),
    ],
)
def test_bad_ladders_are_named(text: str, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        ladder(text, "--rates")
    assert str(caught.value).startswith(f"--rates {text}: ")
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["1.5", "1,2.5", "1:2:+0.5", "0.1:4:x2"])
def test_parts_of_a_request_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a whole number of requests at once"):
        ladder(text, "--concurrencies", whole=True)
