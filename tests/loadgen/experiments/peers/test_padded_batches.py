"""Padded batches of transformers: their waste, the judge of their answers, and the whole comparison."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.agreement import Agreement
from chairlift.bench.alternate import Samples
from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from loadgen.experiments.__main__ import main
from loadgen.experiments.peers.batch_sizes import PAIR, TRANSFORMERS, Size, draw
from loadgen.experiments.peers.padded_batches import Judge
from loadgen.experiments.peers.padding_waste import Waste, waste_of

WORKLOAD = Workload(((5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15)), (2, 6, 3, 1))


@pytest.mark.parametrize("seed", range(10))
def test_waste_is_what_a_rectangle_has_beyond_its_rows(seed: int) -> None:
    rng = random.Random(seed)
    batches, requests, useful, padding, idle = [], [], 0, 0, 0
    num_rows = rng.randint(1, 6)
    for _ in range(rng.randint(1, 5)):
        rows = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(num_rows)]
        positions, steps = (max(column) for column in zip(*rows, strict=True))
        grid = np.full((len(rows), positions + steps - 1), "idle", dtype=object)
        for row, (prompt, answer) in zip(grid, rows, strict=True):
            row[: positions - prompt] = "padding"
            row[positions - prompt : positions + answer - 1] = "useful"  # the last token is never computed
        useful, padding, idle = (
            total + int((grid == kind).sum())
            for total, kind in zip((useful, padding, idle), ("useful", "padding", "idle"), strict=True)
        )
        requests += rows
        batches.append((positions, steps))
    prompts, answers = zip(*requests, strict=True)
    workload = Workload(tuple((1,) * length for length in prompts), answers)
    waste = waste_of(workload, num_rows, batches)
    assert waste == Waste(useful, padding, idle)
    assert waste.share == pytest.approx((padding + idle) / (useful + padding + idle))


def test_wrong_answers_are_refused() -> None:
    def compare(workload: Workload, answers: Sequence[Sequence[int]]) -> Agreement:
        judged.append(answers)
        num_same = sum(token == 1 for answer in answers for token in answer)
        num_tokens = sum(map(len, answers))
        return Agreement(num_tokens, num_same, 0, 0.0)

    judged: list[object] = []
    judge = Judge(compare)
    answers = tuple((1,) * limit for limit in WORKLOAD.max_tokens)
    for _ in range(2):
        assert judge.require_same_ids("x", WORKLOAD, answers).startswith("12 of 12 ids are transformers'")
    assert len(judged) == 4  # each answer once
    with pytest.raises(BenchmarkError, match="x: 1 ids are wrong"):
        judge.require_same_ids("x", WORKLOAD, (*answers[:3], (2,)))


@pytest.mark.slow
def test_comparison_runs_small_and_leaves_its_samples(tmp_path: Path) -> None:
    picture = tmp_path / "batches.svg"
    arguments = ["transformers-batches", "--quick", "--threads", "1", "--draw", str(picture)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").iterdir()
    report = json.loads(path.read_text())
    seconds = report["raw"]["seconds"]
    assert set(seconds) == {"2", "8"}
    assert all(len(values) == 1 for size in seconds.values() for values in size.values())
    assert report["raw"]["waste"]["8"]["idle_rows"] > report["raw"]["waste"]["2"]["idle_rows"]
    assert picture.stat().st_size > 1000


def test_the_picture_must_be_of_a_known_kind(tmp_path: Path) -> None:
    size = Size(4, Samples({TRANSFORMERS: (2.0,), PAIR: (1.0,)}), 100, Waste(6, 2, 2), {})
    assert size.tokens_per_s(PAIR) == 100
    with pytest.raises(BenchmarkError, match=r"picture\.jam"):
        draw([size], "", tmp_path / "picture.jam")
