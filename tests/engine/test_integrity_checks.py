"""An engine checks its KV cache accounting while it serves. If a check fails, it ends every request with an error, logs
one line and exits.
"""

from pathlib import Path

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.errors import IntegrityError
from engine.interfaces import Inbox, Submit
from engine.step_loop import StepLoop
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel, FakeModelRunner
from tests.support.engine.process import run_fake_engine

MODEL = FakeModel(end_probability=0.0)

BUILD_INCONSISTENT = """
def build_parts():
    parts = fake_engine_parts()
    request = Request(RequestId(1), (5, 6), SamplingParams(seed=0, max_tokens=30), arrival_s=0.0, token_credit=1)
    parts.scheduler.add_request(request)
    request.num_pending_tokens = 1
    return parts
"""


class Bench:
    """A step loop with a manual clock and one long request."""

    def __init__(self, interval_s: float) -> None:
        self.now_s = 1000.0
        config = SchedulerConfig(
            num_blocks=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64
        )
        self.scheduler = Scheduler(config)
        inbox = Inbox()
        self.request = Request(RequestId(1), (1, 2, 3), SamplingParams(seed=0, max_tokens=60), arrival_s=self.now_s)
        inbox.put(Submit((self.request,)))
        self.loop = StepLoop(
            self.scheduler,
            FakeModelRunner(MODEL, num_blocks=32, block_size=4),
            inbox,
            lambda _: None,
            integrity_check_interval_s=interval_s,
            clock=lambda: self.now_s,
        )

    def turn(self, passed_s: float) -> tuple[int, int]:
        """Runs one iteration of the loop; returns the numbers of checks and failures so far."""
        self.now_s += passed_s
        self.loop.turn()
        snapshot = self.loop.snapshot
        return snapshot.num_integrity_checks, snapshot.num_integrity_failures


def test_accounting_is_checked_once_per_interval_independent_of_steps() -> None:
    bench = Bench(interval_s=10.0)
    assert [bench.turn(passed_s) for passed_s in (1.0, 8.0, 1.0, 1.0, 8.0, 1.0, 25.0, 9.0)] == [
        (0, 0), (0, 0), (1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (3, 0)
    ]  # fmt: skip


def test_interval_of_zero_checks_nothing() -> None:
    bench = Bench(interval_s=0.0)
    bench.turn(0.0)
    bench.request.num_pending_tokens = -1
    bench.scheduler._waiting.num_tokens += 1
    assert bench.turn(1e6) == (0, 0)


@pytest.mark.parametrize("corruption", ["reference count", "queue", "free list", "progress"])
def test_inconsistency_is_counted_and_ends_the_loop_with_its_text(corruption: str) -> None:
    bench = Bench(interval_s=10.0)
    bench.turn(1.0)
    pool = bench.scheduler._cache.pool
    match corruption:
        case "reference count":
            pool._ref_counts[bench.scheduler._cache.block_ids(bench.request)[0]] += 1
            message = "reference count 2, in 1 tables"
        case "queue":
            bench.scheduler._waiting.num_tokens += 1
            message = "the queue counts 1 tokens"
        case "free list":
            pool._free.append(pool._free[0])
            message = "!= 32"
        case _:
            bench.request.num_rows_in_flight = 1
            message = "request 1 counts 1 rows in flight of 0"
    with pytest.raises(IntegrityError, match=f"stopping to avoid serving wrong results: .*{message}"):
        bench.turn(10.0)
    assert (bench.loop.snapshot.num_integrity_checks, bench.loop.snapshot.num_integrity_failures) == (1, 1)


@pytest.mark.usefixtures("no_linger")
async def test_every_request_and_every_frontend_is_notified(caplog: pytest.LogCaptureFixture) -> None:
    parts = fake_engine_parts(model=MODEL)
    engine = run_engine(parts, integrity_check_interval_s=0.001)
    server = await engine.__aenter__()
    async with AttachClient.open(server.address, acks=False) as client:
        await client.submit(submission(1, [1], 30, token_credit=5))
        await client.until(lambda: len(client.received[1].token_ids) == 5)  # from here on it is paused
        await client.until(lambda: any(status.load.integrity_checks_total for status in client.statuses))
        parts.scheduler._waiting.num_tokens += 1
        (answer,) = await client.ended(1)
        with pytest.raises(EOFError):
            await client.until(lambda: False)
    with pytest.raises(IntegrityError, match="the queue counts"):
        await engine.__aexit__(None, None, None)
    last = client.statuses[-1]
    assert last.state == pb.ENGINE_STATE_FAILED
    assert last.load.integrity_failures_total == 1
    assert answer.completion is not None
    assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
    assert "the queue counts" in answer.completion.detail
    assert not [record for record in caplog.records if record.exc_info]


def test_process_ends_with_one_line(tmp_path: Path) -> None:
    result = run_fake_engine(BUILD_INCONSISTENT, tmp_path, "--integrity-check-interval", "0.001")
    assert result.returncode == 1
    assert result.stderr == (
        "chairlift-engine: error: KV cache accounting is inconsistent; stopping to avoid serving wrong results: "
        "request 1 has 1 pending tokens in 0 rows\n"
    )
