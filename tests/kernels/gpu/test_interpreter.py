"""The order of sums under Triton's interpreter, on which comparisons of bits rest."""

import numpy as np
import pytest

from tests.support.kernels.interpreter import sum_products_in_order


@pytest.mark.parametrize("shape", [(16, 64, 16), (16, 32, 1), (1, 300, 2), (1, 300, 1), (3, 1, 5)])
def test_products_are_added_one_by_one(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, num_terms, num_columns = shape
    rng = np.random.default_rng(num_terms)
    a, b = rng.standard_normal((num_rows, num_terms)), rng.standard_normal((num_terms, num_columns))
    one_by_one = np.zeros((num_rows, num_columns), np.float32)
    for k in range(num_terms):
        one_by_one += a[:, k, None].astype(np.float32) * b[k].astype(np.float32)
    sum_products_in_order(monkeypatch)
    assert np.matmul(a, b, np.float32).tobytes() == one_by_one.tobytes()  # type: ignore[call-overload]
