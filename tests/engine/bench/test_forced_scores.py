"""Scores of forced tokens equal those of a forward pass of the text."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.bench.agreement import load_reference
from engine.bench.forced_scores import score_texts
from engine.bench.serve import engine
from engine.bench.shapes import save_checkpoint
from engine.config import EngineConfig
from engine.serving.parts import EngineParts

TEXTS = [np.random.default_rng(seed).integers(1, 512, length).tolist() for seed, length in enumerate((40, 3, 70))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("tiny", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> EngineParts:
    return engine(EngineConfig(model=str(checkpoint), max_num_seqs=4, max_model_len=128, threads=1))


@torch.inference_mode()
def expected_logprobs(checkpoint: Path) -> list[torch.Tensor]:
    """Per text [len - 1, vocab_size]."""
    model = load_reference(checkpoint)
    return [model(torch.tensor([text[:-1]])).logits[0].log_softmax(dim=-1) for text in TEXTS]


def test_scores_equal_a_forward_pass_of_the_whole_text(checkpoint: Path, parts: EngineParts) -> None:
    scores = score_texts(parts, TEXTS)
    expected = expected_logprobs(checkpoint)
    own = [
        float(rows[at - 1, text[at]]) for rows, text in zip(expected, TEXTS, strict=True) for at in range(1, len(text))
    ]
    assert [score.chosen for score in scores.logprobs] == pytest.approx(own, abs=1e-4)
    assert [score.top_ids[0] for score in scores.logprobs] == torch.cat(expected).argmax(dim=1).tolist()
    assert scores.loss == pytest.approx(-sum(own) / len(own), abs=1e-5)
    assert scores.perplexity == pytest.approx(np.exp(scores.loss))


def test_scores_of_the_whole_vocabulary_at_every_13th_token(checkpoint: Path, parts: EngineParts) -> None:
    scores = score_texts(parts, TEXTS[:1], num_top=512, every=13)
    expected = expected_logprobs(checkpoint)[0][::13]
    assert len(scores.logprobs) == len(expected) == 3
    for score, row in zip(scores.logprobs, expected, strict=True):
        assert sorted(score.top_ids) == list(range(512))
        torch.testing.assert_close(torch.tensor(score.top_values), row[list(score.top_ids)], atol=1e-4, rtol=0)
