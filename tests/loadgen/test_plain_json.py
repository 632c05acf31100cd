"""Whatever goes in, JSON that everyone reads comes out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from loadgen.measure.steady_state import Span
from loadgen.plain_json import plain, to_json
from loadgen.record import Status
from loadgen.trace.schema import Accounting


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (np.float64(1.5), 1.5),
        (np.int64(7), 7),
        (np.array([1.0, np.nan]), [1.0, None]),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        (Span(0.0, math.nan, steady=True), {"start_s": 0.0, "end_s": None, "steady": True}),
        (Accounting(3, {"short": 1}), {"read": 3, "dropped": {"short": 1}, "altered": {}}),
        (Path("a/b"), "a/b"),
        (True, True),
        (None, None),
    ],
)
def test_plain(value: object, expected: object) -> None:
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)


def test_the_text_is_json() -> None:
    value = {"a": [math.nan, np.float32(0.5)], "b": Status.OK, "ü": "\n"}
    assert json.loads(to_json(value), parse_constant=pytest.fail) == {"a": [None, 0.5], "b": 2, "ü": "\n"}
