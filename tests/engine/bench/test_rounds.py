"""Alternating runs: kept samples and rejected answers."""

import argparse
from pathlib import Path

import pytest

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import BenchmarkError, Settings
from chairlift.bench.run import Run
from engine.bench.cpu_floors import Floors
from engine.bench.rounds import alternate_runs

SETTINGS = Settings(
    rounds=3,
    quick=True,
    threads=1,
    scratch=Path(),
    floors=Floors(1, 1.0, 1.0, 1.0, {}),
    progress=lambda _: None,
    options=argparse.Namespace(),
)


def run_of(wall_s: float, *answers: tuple[int, ...]) -> Run:
    return Run(answers, tuple((0.0,) * len(answer) for answer in answers), (0.0,) * len(answers), (), wall_s)


def test_the_warm_up_round_is_not_kept() -> None:
    walls = iter((9.0, 1.0, 3.0, 2.0))
    rounds = alternate_runs({"only": lambda: run_of(next(walls), (1, 2))}, SETTINGS)
    samples = rounds.samples(lambda run: run.wall_s)
    assert samples.raw == {"only": (1.0, 3.0, 2.0)}
    assert samples.best("only") == 1.0


def test_figure_of_some_variants() -> None:
    rounds = alternate_runs({"a": lambda: run_of(1.0, (1,)), "b": lambda: run_of(2.0, (1,))}, SETTINGS)
    assert set(rounds.samples(lambda run: run.wall_s, ["b"]).raw) == {"b"}


def test_answers_that_differ_between_rounds_are_rejected() -> None:
    last = iter((5, 5, 6))
    with pytest.raises(BenchmarkError, match="two rounds of drifting: answers of request 1 differ from token 2 on"):
        alternate_runs({"drifting": lambda: run_of(1.0, (1,), (1, 2, next(last)))}, SETTINGS)


def test_equal_answers_in_lists_and_tuples_pass() -> None:
    require_equal_ids("lists and tuples", [[1, 2], (3,)], ((1, 2), [3]))
