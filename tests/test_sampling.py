"""The marker `sampled` leaves every value of each parameter to `make test`."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

from tests.conftest import sample


class Case:
    def __init__(self, **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)


def test_every_value_is_in_few_cases() -> None:
    cases = [Case(size=size, dtype=dtype, seed=0) for size, dtype in itertools.product(range(7), "ab")]
    chosen = [cast(Case, case).callspec.params for case in sample(cast(Any, cases))]
    assert len(chosen) == 7
    assert {case["size"] for case in chosen} == set(range(7))
    assert {case["dtype"] for case in chosen} == {"a", "b"}
