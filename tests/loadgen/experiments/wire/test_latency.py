from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.client import Stream
from loadgen.experiments.wire.latency import pair_latencies_ms


def test_latency_is_arrival_less_sampling_of_the_newest_tokens(tmp_path: Path) -> None:
    times = tmp_path / "times"
    np.array([7, 10_001_000_000, 10_002_000_000]).tofile(times)
    assert pair_latencies_ms(Stream(10.0, (10.0015, 10.0030), (1, 1)), times) == pytest.approx([0.5, 1.0])


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    times = tmp_path / "times"
    np.array([1]).tofile(times)
    with pytest.raises(BenchmarkError, match="1 tokens were sampled, 2 have arrived"):
        pair_latencies_ms(Stream(0.0, (0.1,), (2,)), times)
