"""Padded batches of transformers: what they are made of, that their answers are right, and the whole comparison."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.alternate import Samples
from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.__main__ import main
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_model import generate_padded
from loadgen.experiments.peers.batch_sizes import PAIR, TRANSFORMERS, Size, draw
from loadgen.experiments.peers.padded_batches import Judge
from loadgen.experiments.peers.padding_waste import PaddedBatch, Waste, waste_of

WORKLOAD = Workload(((5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15)), (2, 6, 3, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_reference(save_checkpoint("tiny", tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("seed", range(10))
def test_waste_is_what_a_rectangle_has_beyond_its_rows(seed: int) -> None:
    rng = random.Random(seed)
    batches, useful, padding, idle = [], 0, 0, 0
    for _ in range(rng.randint(1, 5)):
        rows = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(1, 6))]
        positions, steps = (max(column) for column in zip(*rows, strict=True))
        grid = np.full((len(rows), positions + steps - 1), "idle", dtype=object)
        for row, (prompt, answer) in zip(grid, rows, strict=True):
            row[: positions - prompt] = "padding"
            row[positions - prompt : positions + answer - 1] = "useful"  # the last token is never computed
        useful, padding, idle = (
            total + int((grid == kind).sum())
            for total, kind in zip((useful, padding, idle), ("useful", "padding", "idle"), strict=True)
        )
        batches.append(PaddedBatch(*(tuple(column) for column in zip(*rows, strict=True)), positions, steps))
    waste = waste_of(batches)
    assert waste == Waste(useful, padding, idle)
    assert waste.share == pytest.approx((padding + idle) / (useful + padding + idle))


def test_padded_answers_are_those_of_each_prompt_alone(model: object) -> None:
    answers, batches = generate_padded(model, WORKLOAD, 3)
    assert tuple(map(len, answers)) == WORKLOAD.max_tokens
    assert batches == [PaddedBatch((3, 1, 5), (2, 6, 3), 5, 6), PaddedBatch((2,), (1,), 2, 1)]
    assert greedy_agreement(model, WORKLOAD.prompts, answers).num_wrong == 0
    assert answers == generate_padded(model, WORKLOAD, 1)[0]


def test_wrong_answers_are_refused(model: object) -> None:
    judge = Judge(model)
    answers, _ = generate_padded(model, WORKLOAD, 2)
    assert judge.require_same_ids("x", WORKLOAD, answers).startswith("12 of 12 ids are transformers'")
    with pytest.raises(BenchmarkError, match="x: 1 ids are wrong"):
        judge.require_same_ids("x", WORKLOAD, (*answers[:3], ((answers[3][0] + 1) % 512,)))
    with pytest.raises(BenchmarkError, match="an answer has 1 tokens, 2 were asked for"):
        judge.require_same_ids("x", WORKLOAD, (answers[0][:1], *answers[1:]))


def test_the_comparison_runs_small_and_leaves_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "batches.svg"
    arguments = ["transformers-batches", "--quick", "--threads", "1", "--draw", str(picture)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").iterdir()
    report = json.loads(path.read_text())
    seconds = report["raw"]["seconds"]
    assert set(seconds) == {"2", "8"}
    assert all(len(values) == 1 for size in seconds.values() for values in size.values())
    assert report["raw"]["waste"]["8"]["idle_rows"] > report["raw"]["waste"]["2"]["idle_rows"]
    assert "nobody asked for" in capsys.readouterr().out
    for words in (TRANSFORMERS, PAIR, "output tokens per second", "padding in front of prompts"):
        assert words in picture.read_text(), words


def test_the_picture_must_be_of_a_known_kind(tmp_path: Path) -> None:
    size = Size(4, Samples({TRANSFORMERS: (2.0,), PAIR: (1.0,)}), 100, Waste(6, 2, 2), {})
    assert size.tokens_per_s(PAIR) == 100
    with pytest.raises(BenchmarkError, match=r"picture\.jam"):
        draw([size], "", tmp_path / "picture.jam")
