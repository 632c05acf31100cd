"""Answers come from rungs that count, and noise does not make attainment rise with the load."""

import math
import random

import pytest

from loadgen.checks.finding import Level
from loadgen.measure.quantiles import Distribution
from loadgen.sweep.capacity import Answer, answer, answer_text, monotone_attainment, next_probe, settled
from loadgen.sweep.load_level import Rung

NOTHING = Distribution(0, math.nan, math.nan, math.nan, math.nan, ((50.0, math.nan), (99.0, math.nan)))


def rung(load: float, good: int, offered: int = 100, level: Level = "VALID") -> Rung:
    return Rung(
        load=load, level=level, reasons=() if level == "VALID" else ("errors: 7 % failed",), folder=f"rate-{load:g}",
        offered=offered, good=good, goodput_per_s=load, ttft=NOTHING, tpot=NOTHING, e2e=NOTHING,
        normalized=NOTHING, requests_per_s=load, output_tokens_per_s=100 * load, interactivity=50.0,
    )  # fmt: skip


def test_the_highest_rung_that_keeps_the_limits_and_the_next_one() -> None:
    rungs = [rung(1, 100), rung(2, 99), rung(4, 92), rung(8, 60)]
    assert answer(rungs, 0.9) == Answer(0.9, 4, 8, proven=True)
    assert answer(rungs, 0.99) == Answer(0.99, 2, 4, proven=True)
    assert answer(rungs, 0.5) == Answer(0.5, 8, None, proven=False)
    assert answer(rungs[2:], 0.99) == Answer(0.99, None, 4, proven=True)


def test_an_invalid_rung_is_not_used() -> None:
    """It says 100 % at 8, and 0 % at 2: neither counts."""
    rungs = [rung(1, 100), rung(2, 0, level="INVALID"), rung(4, 95), rung(8, 100, level="INVALID"), rung(16, 10)]
    assert answer(rungs, 0.9) == Answer(0.9, 4, 8, proven=False)
    assert answer([rung(1, 100, level="INVALID")], 0.9) == Answer(0.9, None, 1, proven=False)
    assert answer([rung(1, 100), rung(2, 95, level="DEGRADED")], 0.9).load == 2


def test_a_rung_that_was_played_again_counts_when_it_is_valid() -> None:
    rungs = [
        rung(1, 100),
        rung(2, 0, level="INVALID"),
        rung(2, 97),
        rung(4, 9, level="INVALID"),
        rung(4, 8, level="INVALID"),
    ]
    assert [(one.load, one.good) for one in settled(rungs)] == [(1, 100), (2, 97), (4, 8)]
    assert answer(rungs, 0.9) == Answer(0.9, 2, 4, proven=False)


def test_nothing_offered_is_no_proof() -> None:
    assert answer([rung(1, 0, offered=0)], 0.9) == Answer(0.9, None, 1, proven=False)


@pytest.mark.parametrize("seed", range(30))
def test_the_monotone_fit_is_the_closest_one_that_does_not_rise(seed: int) -> None:
    """Against the max-min formula of isotonic regression (Barlow et al. 1972), by brute force."""
    draw = random.Random(seed)
    rungs = [rung(load + 1, draw.randint(0, offered), offered) for load in range(9) if (offered := draw.randint(1, 50))]
    good, offered = [one.good for one in rungs], [one.offered for one in rungs]

    def mean(low: int, high: int) -> float:
        return sum(good[low : high + 1]) / sum(offered[low : high + 1])

    expected = [
        min(max(mean(low, high) for high in range(place, len(rungs))) for low in range(place + 1))
        for place in range(len(rungs))
    ]
    assert monotone_attainment(rungs) == pytest.approx(expected)


def test_a_lucky_rung_above_a_failed_one_is_averaged_with_it() -> None:
    assert answer([rung(1, 100), rung(2, 80), rung(3, 91)], 0.9) == Answer(0.9, 1, 2, proven=True)
    assert answer([rung(1, 100), rung(2, 89), rung(3, 95)], 0.9) == Answer(0.9, 3, None, proven=False)


def test_probes_lie_in_the_middle_of_the_gap_until_it_is_small() -> None:
    rungs = [rung(2, 100), rung(8, 10)]
    assert next_probe(rungs, 0.9, 0.05, "rate") == 4
    assert next_probe([*rungs, rung(2.05, 50)], 0.9, 0.05, "rate") is None
    assert next_probe([rung(2, 100)], 0.9, 0.05, "rate") is None
    assert next_probe([rung(2, 50)], 0.9, 0.05, "rate") == 1


def test_probes_of_concurrency_are_whole_and_never_repeat() -> None:
    assert next_probe([rung(2, 100), rung(5, 10)], 0.9, 0.05, "concurrency") == 3
    assert next_probe([rung(2, 100), rung(3, 10)], 0.9, 0.05, "concurrency") is None
    assert next_probe([rung(1, 10)], 0.9, 0.05, "concurrency") is None


def test_answers_in_words() -> None:
    rungs = [rung(1, 100), rung(2, 92), rung(4, 50), rung(8, 0, level="INVALID")]

    def said(target: float, among: list[Rung]) -> str:
        return answer_text(answer(among, target), among, "rate", "TTFT 500 ms")

    assert said(0.9, rungs) == "90 % of requests keep TTFT 500 ms up to 2 requests/s (92.0 %); at 4, 50.0 % do"
    assert said(0.99, rungs[:1]).endswith(
        "up to 1 requests/s (100.0 %), the highest rung: play higher ones to find the end"
    )
    assert said(0.99, rungs[2:]).endswith("at no rung; 50.0 % at 4 requests/s, the lowest")
    assert said(0.5, rungs).endswith("up to 4 requests/s (50.0 %); 8 proves nothing, it is INVALID: play it again")
    assert said(0.5, rungs[3:]).endswith("not known, no rung is valid")
