from typing import Any

import pytest

from loadgen.errors import OptionError
from loadgen.run.options import RunOptions


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"workers": 0}, "--workers is 0, must be at least 1"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"max_concurrency": -1}, "--max-concurrency is -1"),
        ({"concurrency": 2, "max_concurrency": 2}, "give one of them"),
        ({"overflow": "drop"}, "--overflow drop needs --max-concurrency"),
        ({"cancel_rate": 1.1}, "--cancel-rate is 1.1, must be 0 to 1"),
        ({"drain_timeout_s": 0.0}, "--drain-timeout is 0 s, must be above 0"),
        ({"probe_timeout_s": float("nan")}, "probe_timeout_s is nan"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        RunOptions(**values)
