"""Answers come from load levels that count, and noise does not make attainment rise with the load."""

import math
import random

import pytest

from loadgen.checks.finding import Level
from loadgen.measure.quantiles import Distribution
from loadgen.sweep.capacity import Answer, answer, answer_text, monotone_attainment, next_probe, settled
from loadgen.sweep.load_level import LoadLevel

NOTHING = Distribution(0, math.nan, math.nan, math.nan, math.nan, ((50.0, math.nan), (99.0, math.nan)))


def load_level(load: float, good: int, offered: int = 100, level: Level = "VALID") -> LoadLevel:
    return LoadLevel(
        load=load, level=level, reasons=() if level == "VALID" else ("errors: 7 % failed",), folder=f"rate-{load:g}",
        offered=offered, good=good, goodput_per_s=load, ttft=NOTHING, tpot=NOTHING, e2e=NOTHING,
        normalized=NOTHING, requests_per_s=load, output_tokens_per_s=100 * load, interactivity=50.0,
    )  # fmt: skip


def test_the_highest_load_level_that_keeps_the_limits_and_the_next_one() -> None:
    load_levels = [load_level(1, 100), load_level(2, 99), load_level(4, 92), load_level(8, 60)]
    assert answer(load_levels, 0.9) == Answer(0.9, 4, 8, proven=True)
    assert answer(load_levels, 0.99) == Answer(0.99, 2, 4, proven=True)
    assert answer(load_levels, 0.5) == Answer(0.5, 8, None, proven=False)
    assert answer(load_levels[2:], 0.99) == Answer(0.99, None, 4, proven=True)


def test_an_invalid_load_level_is_not_used() -> None:
    """It says 100 % at 8, and 0 % at 2: neither counts."""
    load_levels = [
        load_level(1, 100),
        load_level(2, 0, level="INVALID"),
        load_level(4, 95),
        load_level(8, 100, level="INVALID"),
        load_level(16, 10),
    ]
    assert answer(load_levels, 0.9) == Answer(0.9, 4, 8, proven=False)
    assert answer([load_level(1, 100, level="INVALID")], 0.9) == Answer(0.9, None, 1, proven=False)
    assert answer([load_level(1, 100), load_level(2, 95, level="DEGRADED")], 0.9).load == 2


def test_a_load_level_that_was_run_again_counts_when_it_is_valid() -> None:
    load_levels = [
        load_level(1, 100),
        load_level(2, 0, level="INVALID"),
        load_level(2, 97),
        load_level(4, 9, level="INVALID"),
        load_level(4, 8, level="INVALID"),
    ]
    assert [(one.load, one.good) for one in settled(load_levels)] == [(1, 100), (2, 97), (4, 8)]
    assert answer(load_levels, 0.9) == Answer(0.9, 2, 4, proven=False)


def test_nothing_offered_is_no_proof() -> None:
    assert answer([load_level(1, 0, offered=0)], 0.9) == Answer(0.9, None, 1, proven=False)


@pytest.mark.parametrize("seed", range(30))
def test_the_monotone_fit_is_the_closest_one_that_does_not_rise(seed: int) -> None:
    """Against the max-min formula of isotonic regression (Barlow et al. 1972), by brute force."""
    draw = random.Random(seed)
    load_levels = [
        load_level(load + 1, draw.randint(0, offered), offered) for load in range(9) if (offered := draw.randint(1, 50))
    ]
    good, offered = [one.good for one in load_levels], [one.offered for one in load_levels]

    def mean(low: int, high: int) -> float:
        return sum(good[low : high + 1]) / sum(offered[low : high + 1])

    expected = [
        min(max(mean(low, high) for high in range(place, len(load_levels))) for low in range(place + 1))
        for place in range(len(load_levels))
    ]
    assert monotone_attainment(load_levels) == pytest.approx(expected)


def test_a_lucky_load_level_above_a_failed_one_is_averaged_with_it() -> None:
    assert answer([load_level(1, 100), load_level(2, 80), load_level(3, 91)], 0.9) == Answer(0.9, 1, 2, proven=True)
    assert answer([load_level(1, 100), load_level(2, 89), load_level(3, 95)], 0.9) == Answer(0.9, 3, None, proven=False)


def test_probes_lie_in_the_middle_of_the_gap_until_it_is_small() -> None:
    load_levels = [load_level(2, 100), load_level(8, 10)]
    assert next_probe(load_levels, 0.9, 0.05, "rate") == 4
    assert next_probe([*load_levels, load_level(2.05, 50)], 0.9, 0.05, "rate") is None
    assert next_probe([load_level(2, 100)], 0.9, 0.05, "rate") is None
    assert next_probe([load_level(2, 50)], 0.9, 0.05, "rate") == 1


def test_probes_of_concurrency_are_whole_and_never_repeat() -> None:
    assert next_probe([load_level(2, 100), load_level(5, 10)], 0.9, 0.05, "concurrency") == 3
    assert next_probe([load_level(2, 100), load_level(3, 10)], 0.9, 0.05, "concurrency") is None
    assert next_probe([load_level(1, 10)], 0.9, 0.05, "concurrency") is None


def test_answers_in_words() -> None:
    load_levels = [load_level(1, 100), load_level(2, 92), load_level(4, 50), load_level(8, 0, level="INVALID")]

    def said(target: float, among: list[LoadLevel]) -> str:
        return answer_text(answer(among, target), among, "rate", "TTFT 500 ms")

    assert said(0.9, load_levels) == "90 % of requests keep TTFT 500 ms up to 2 requests/s (92.0 %); at 4, 50.0 % do"
    assert said(0.99, load_levels[:1]).endswith(
        "up to 1 requests/s (100.0 %), the highest load level: run higher ones to find the end. "
        "Of 100 requests that may be chance: 300 are needed"
    )
    assert said(0.99, [load_level(1, 300, offered=300)]).endswith(
        "up to 1 requests/s (100.0 %), the highest load level: run higher ones to find the end"
    )
    assert said(0.99, load_levels[2:]).endswith("at no load level; 50.0 % at 4 requests/s, the lowest")
    assert said(0.5, load_levels).endswith("up to 4 requests/s (50.0 %); 8 proves nothing, it is INVALID: run it again")
    assert said(0.5, load_levels[3:]).endswith("not known, no load level is valid")
