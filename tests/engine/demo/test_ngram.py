"""The 3-gram baseline is a probability distribution and learns from its data."""

import numpy as np

from tests.support.demo_model.ngram import TrigramModel


def _documents(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 6, size=rng.integers(2, 20)).astype(np.int64) for _ in range(count)]


def test_probabilities_sum_to_one_in_every_context() -> None:
    vocab_size = 9  # ids 6, 7 and 8 never occur
    model = TrigramModel(_documents(0, 30), vocab_size)
    nexts = np.arange(vocab_size)
    for before in range(vocab_size + 1):
        for last in range(vocab_size):
            given = model.probabilities(np.full(vocab_size, before), np.full(vocab_size, last), nexts)
            assert (given > 0).all()
            assert abs(given.sum() - 1.0) < 1e-9


def test_repeated_sequence_is_learned() -> None:
    cycle = [np.tile(np.arange(5), 40).astype(np.int64)]
    noise = _documents(1, 40)
    model = TrigramModel(cycle + noise, 6)
    assert model.loss(cycle) < 0.7 * model.loss(_documents(2, 40))


def test_loss_of_random_text_is_near_its_entropy() -> None:
    model = TrigramModel(_documents(3, 4000), 6)
    assert abs(model.loss(_documents(4, 400)) - np.log(6)) < 0.05
