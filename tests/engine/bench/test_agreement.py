"""Wrong ids are found, near-ties are accepted."""

from typing import Any

import pytest
import torch

from chairlift.bench.agreement import require_same_ids
from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_peer import generate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_reference(save_checkpoint("tiny", tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(((5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)), (6, 3, 5))


def test_the_models_own_answers_agree(model: Any, workload: Workload) -> None:
    answers, _ = generate(model, workload, batch_size=2)
    assert [len(answer) for answer in answers] == [6, 3, 5]
    agreement = greedy_agreement(model, workload.prompts, answers)
    assert (agreement.num_tokens, agreement.num_same, agreement.num_wrong) == (14, 14, 0)
    assert agreement.share_same == 1
    require_same_ids("itself", agreement)


def test_a_wrong_token_is_one_wrong_position(model: Any, workload: Workload) -> None:
    answers = [list(answer) for answer in generate(model, workload, batch_size=3)[0]]
    answers[1][-1] = answers[1][-1] % 500 + 1  # the last one: what follows a wrong token is judged after it
    agreement = greedy_agreement(model, workload.prompts, answers)
    assert (agreement.num_same, agreement.num_wrong) == (13, 1)
    assert agreement.worst_gap > 0
    with pytest.raises(BenchmarkError, match="engine: 1 ids are wrong; 13 of 14 ids"):
        require_same_ids("engine", agreement)


def test_a_token_as_good_as_the_best_is_a_near_tie(model: Any, workload: Workload) -> None:
    answers = [list(answer) for answer in generate(model, workload, batch_size=3)[0]]
    with torch.inference_mode():
        logits = model(torch.tensor([[*workload.prompts[0], *answers[0][:-1]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    answers[0][-1] = int(logits.topk(2).indices[1])
    gap = best - second
    accepted = greedy_agreement(model, workload.prompts, answers, near_tie=gap * 1.01)
    assert (accepted.num_same, accepted.num_near_ties, accepted.num_wrong) == (13, 1, 0)
    assert accepted.worst_gap == pytest.approx(gap, rel=1e-3)
    assert greedy_agreement(model, workload.prompts, answers, near_tie=gap * 0.99).num_wrong == 1
