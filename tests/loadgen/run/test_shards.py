import numpy as np
import pytest

from loadgen.run.options import RunOptions
from loadgen.run.shards import cancellations, make_shards, worker_count
from loadgen.trace.schema import Accounting, Trace


def workload(arrival_s: list[float], output_tokens: list[int]) -> Trace:
    count = len(arrival_s)
    return Trace(
        name="made up",
        format="jsonl",
        digest="d" * 64,
        arrival_s=np.array(arrival_s, dtype=np.float64),
        input_tokens=np.ones(count, dtype=np.int64),
        output_tokens=np.array(output_tokens, dtype=np.int64),
        rows=np.arange(count),
        accounting=Accounting(count),
    )


STEADY = workload([0.1 * index for index in range(1000)], [900] * 1000)  # 9,000 tokens/s for 100 s
BURST = workload([0.0] * 20 + [100.0], [3100] * 20 + [1])  # 6,200 tokens/s in ten seconds, 620 on average
LONG = workload([0.0, 9e9], [5, 5])  # a bin of ten seconds each would not fit into memory


@pytest.mark.parametrize(
    ("trace", "num_cpus", "expected"),
    [(LONG, 64, 1), (STEADY, 64, 3), (STEADY, 3, 2), (STEADY, 1, 1), (BURST, 64, 3), (workload([0.0], [5]), 64, 1)],
)
def test_workers_are_as_many_as_the_busiest_moment_needs_but_leave_a_core(
    trace: Trace, num_cpus: int, expected: int
) -> None:
    num_workers, warning = worker_count(trace, RunOptions(), num_cpus)
    assert num_workers == expected
    assert bool(warning) == (num_cpus < 4)


def test_a_warning_says_that_there_are_too_few_workers() -> None:
    assert "9000 tokens/s need 3 workers" in worker_count(STEADY, RunOptions(workers=1), 64).warning
    assert worker_count(STEADY, RunOptions(workers=8), 2) == (8, "")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (RunOptions(concurrency=2, workers=4), 2),
        (RunOptions(max_concurrency=3, workers=4), 3),
        (RunOptions(concurrency=200), 4),
        (RunOptions(concurrency=4), 1),
    ],
)
def test_every_worker_has_a_place_in_the_concurrency(options: RunOptions, expected: int) -> None:
    assert worker_count(STEADY, options, 64).num_workers == expected


def test_requests_are_dealt_out_one_by_one() -> None:
    shards = make_shards(STEADY, RunOptions(concurrency=8), 3)
    assert [shard.order for shard in shards] == [range(worker, 1000, 3) for worker in range(3)]
    assert [len(shard.due_ns) for shard in shards] == [334, 333, 333]
    assert shards[1].due_ns[:3] == [100_000_000, 400_000_000, 700_000_000]
    assert [shard.concurrency for shard in shards] == [3, 3, 2]
    assert [shard.max_concurrency for shard in shards] == [None] * 3
    assert [shard.max_concurrency for shard in make_shards(STEADY, RunOptions(max_concurrency=4), 3)] == [2, 1, 1]
    assert worker_count(STEADY, RunOptions(workers=3, max_concurrency=2), 8).num_workers == 2


def test_the_share_of_cancelled_calls_is_kept_and_reproduced() -> None:
    rng = np.random.default_rng(0)
    trace = workload([float(i) for i in range(4000)], rng.integers(1, 50, 4000).tolist())
    after = cancellations(trace, RunOptions(cancel_rate=0.25, seed=5))
    can_be = trace.output_tokens > 1
    assert 0.22 < (after[can_be] > 0).mean() < 0.28
    assert (after[~can_be] == 0).all()
    assert (after < trace.output_tokens).all()
    assert (after == cancellations(trace, RunOptions(cancel_rate=0.25, seed=5))).all()
    assert (after != cancellations(trace, RunOptions(cancel_rate=0.25, seed=6))).any()
    assert not cancellations(trace, RunOptions()).any()
    assert (cancellations(trace, RunOptions(cancel_rate=1.0))[can_be] > 0).all()
