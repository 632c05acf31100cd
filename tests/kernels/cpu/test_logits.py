"""One row of logits before sampling, against numpy."""

import numpy as np
import pytest

from kernels.cpu.logits import largest, log_sum_exp, write_top

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1.0, 3.0, 2.0], 3.0),
        ([-1.0, -3.0, -2.0], -1.0),
        ([-0.0], 0.0),
        ([-INF, -5.0], -5.0),
        ([-INF, -INF], -INF),
        ([3.4e38, -3.4e38, 1e-45], np.float32(3.4e38)),
    ],
)
def test_largest(values, want):
    assert largest(np.array(values, dtype=np.float32)) == (want, True)


@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_largest_notices_one_improper_value(bad, place):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values[place] = bad
    assert not largest(values)[1]


def test_log_sum_exp_is_exact_where_floats_would_overflow():
    values = np.array([800.0, 799.0, -INF, -800.0], dtype=np.float32)
    assert log_sum_exp(values, np.float32(800.0)) == pytest.approx(800.0 + np.log(1 + np.exp(-1.0)), rel=1e-15)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 50])
def test_top_is_ordered_with_equal_ones_by_lowest_id(num_top):
    values = np.random.default_rng(num_top).integers(-9, 9, 50).astype(np.float32)
    ids, found = np.full(50, -1), np.full(50, np.nan)
    write_top(values, num_top, 2.0, ids, found)
    want = np.argsort(-values, kind="stable")[:num_top]
    assert ids.tolist() == want.tolist() + [-1] * (50 - num_top)
    assert found[:num_top].tolist() == (values[want] - 2.0).tolist()
    assert np.isnan(found[num_top:]).all()
