"""Radix selection against a sort."""

import numpy as np
import pytest

from kernels.cpu.select import fill_keys, select_key

SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -np.inf, np.inf, 1.0, -1.0, 1.0000001], dtype=np.float32)


def _keys(values):
    keys = np.zeros(len(values), dtype=np.uint32)
    fill_keys(values, keys)
    return keys


def test_keys_have_the_order_of_the_floats():
    keys = _keys(SPECIAL).astype(np.int64)
    for i, a in enumerate(SPECIAL):
        for j, b in enumerate(SPECIAL):
            assert (keys[i] < keys[j]) == (a < b), (a, b)
            assert (keys[i] == keys[j]) == (a == b), (a, b)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "wide"])
@pytest.mark.parametrize("size", [1, 2, 100, 5000])
def test_count_select_finds_the_kth_largest(kind, size):
    rng = np.random.default_rng(size)
    values = {
        "normal": rng.standard_normal(size),
        "ties": rng.integers(-3, 3, size),
        "equal": np.full(size, 2.5),
        "wide": rng.standard_normal(size) * 10.0 ** rng.integers(-30, 30, size),
    }[kind].astype(np.float32)
    keys = _keys(values)
    ordered = np.sort(keys)[::-1]
    for k in {1, 2, size // 3, size - 1, size} & set(range(1, size + 1)):
        key, above = select_key(keys, None, float(k))
        assert key == ordered[k - 1]
        assert above == (keys > key).sum() < k


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_mass_select_finds_where_the_share_is_reached(share, spread):
    rng = np.random.default_rng(7)
    values = (rng.standard_normal(3000) * spread).astype(np.float32)
    keys, weights = _keys(values), np.exp(values.astype(np.float64))
    target = share * weights.sum()
    key, above = select_key(keys, weights, target)
    assert above == pytest.approx(weights[keys > key].sum(), rel=1e-12, abs=0)
    assert above < target <= weights[keys >= key].sum()


def test_a_target_beyond_all_weight_selects_everything():
    keys = _keys(np.array([1.0, 2.0, 3.0], dtype=np.float32))
    key, above = select_key(keys, np.ones(3), 3.5)
    assert key < keys.min()
    assert above == 3.0
