from pathlib import Path

import numpy as np
import pytest

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.serve import Run
from loadgen.experiments.client import Delivery
from loadgen.experiments.wire.latency import pair_latencies_ms


def delivery(started_s: float, *times_s: float) -> Delivery:
    run = Run(((1,) * len(times_s),), (times_s,), (0.0,), (), times_s[-1])
    return Delivery(run, num_messages=len(times_s), started_s=started_s)


def test_latency_is_arrival_less_sampling_of_the_newest_tokens(tmp_path: Path) -> None:
    times = tmp_path / "times"
    np.array([7, 10_001_000_000, 10_002_000_000]).tofile(times)
    assert pair_latencies_ms(delivery(10.0, 0.0015, 0.0030), times) == pytest.approx([0.5, 1.0])


def test_missing_times_are_an_error(tmp_path: Path) -> None:
    times = tmp_path / "times"
    np.array([1]).tofile(times)
    with pytest.raises(BenchmarkError, match="1 tokens were sampled, 2 have arrived"):
        pair_latencies_ms(delivery(0.0, 0.1, 0.2), times)
