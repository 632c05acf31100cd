"""Runs for tests are what they say."""

import numpy as np
import pytest

from loadgen.measure.metrics import measure
from loadgen.measure.samples import samples_of
from loadgen.record import ABSENT, Status
from loadgen.trace.schema import workload_digest
from tests.support.loadgen.runs import synthetic_run


def test_a_seed_is_a_workload_and_a_noise_seed_another_run_of_it() -> None:
    one, again = synthetic_run(50, seed=1), synthetic_run(50, seed=1)
    noisy, other = synthetic_run(50, seed=1, noise_seed=2), synthetic_run(50, seed=2)
    assert (one.chunks == again.chunks).all()
    assert workload_digest(one.workload) == workload_digest(noisy.workload) != workload_digest(other.workload)
    assert not np.array_equal(one.requests["first_ns"], noisy.requests["first_ns"])


def test_latencies_are_around_what_was_asked_for() -> None:
    latencies = measure(synthetic_run(2000, ttft_ms=300.0, itl_ms=20.0, tokens_per_message=4)).whole.latencies
    assert latencies.ttft.p50 == pytest.approx(300.0, rel=0.05)
    assert latencies.itl.p50 == pytest.approx(20.0, rel=0.05)
    assert latencies.chunk_gap.p50 == pytest.approx(80.0, rel=0.05)
    slower = measure(synthetic_run(2000, slowing=1.0)).whole.latencies.ttft.mean
    assert slower == pytest.approx(1.5 * measure(synthetic_run(2000)).whole.latencies.ttft.mean, rel=0.05)


@pytest.mark.parametrize("status", [status for status in Status if status != Status.OK])
def test_every_outcome_leaves_the_marks_it_leaves_in_a_real_run(status: Status) -> None:
    run = synthetic_run(60, outcomes={status: 7})
    assert (run.requests["status"] == status).sum() == 7
    rows = run.requests[run.requests["status"] == status]
    assert ((rows["sent_ns"] == ABSENT) == (status in (Status.UNSENT, Status.DROPPED))).all()
    assert ((rows["ended_ns"] == ABSENT) == (status in (Status.UNSENT, Status.DROPPED, Status.IN_FLIGHT))).all()
    assert np.isnan(samples_of(run).ttft[run.requests["status"] == status]).all() == (
        status in (Status.UNSENT, Status.DROPPED, Status.ERROR)
    )
