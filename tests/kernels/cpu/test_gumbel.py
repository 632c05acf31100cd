"""Gumbel-max draws against taking every logarithm."""

import numpy as np
import pytest

from kernels.cpu.gumbel import draw_from, draw_from_all
from kernels.reference.philox import token_words


def _scores(d, ids, seed, position):
    u = (token_words(seed, position, ids).astype(np.float64) + 0.5) / 2**32
    return d - np.log(-np.log(u))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("size", [1, 3, 1023, 1025, 5000])
def test_draw_from_all_takes_the_best_score(size, spread):
    """Flat logits, where noise alone decides, and steep ones; more than one chunk and a last group that is not full."""
    rng = np.random.default_rng(size)
    for position in range(40):
        values = (rng.standard_normal(size) * spread).astype(np.float32)
        values[rng.random(size) < 0.1] = -np.inf
        values[rng.integers(size)] = spread
        top_id, seed = int(values.argmax()), int(rng.integers(2**63))
        temperature = float(rng.choice([0.2, 1.0, 7.0]))
        d = (values.astype(np.float64) - np.float64(values[top_id])) / temperature
        want = int(_scores(d, np.arange(size), seed, position).argmax())
        assert draw_from_all(values, top_id, temperature, np.uint64(seed), position) == want


@pytest.mark.parametrize("density", [0.001, 0.1, 1.0])
def test_draw_from_candidates_takes_the_best_score(density):
    rng = np.random.default_rng(1)
    for position in range(200):
        ids = np.flatnonzero(rng.random(4000) < density).astype(np.int32)
        if not len(ids):
            ids = np.array([3999], dtype=np.int32)
        d = -rng.exponential(3.0, len(ids))
        seed = int(rng.integers(2**63))
        want = int(ids[_scores(d, ids.astype(np.int64), seed, position).argmax()])
        assert draw_from(ids, d, np.uint64(seed), position) == want


def test_both_specializations_draw_the_same():
    rng = np.random.default_rng(2)
    values = rng.standard_normal(700).astype(np.float32)
    top = values.argmax()
    d = values.astype(np.float64) - np.float64(values[top])
    ids = np.arange(700, dtype=np.int32)
    for position in range(300):
        assert draw_from(ids, d, np.uint64(5), position) == draw_from_all(values, int(top), 1.0, np.uint64(5), position)
