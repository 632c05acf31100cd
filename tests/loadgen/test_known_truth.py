"""Latencies that are known because a mock server chose them.

In virtual time the figures are exact numbers. Over real sockets messages can only be late: the bounds are the server's
own record and the times it keeps to.
"""

from typing import Any

import numpy as np
import pytest

from loadgen.measure.samples import samples_of
from loadgen.mock.behaviour import MockBehaviour
from loadgen.record import RunData, Status
from loadgen.run.controller import run_workload
from loadgen.target.base import TargetSpec
from loadgen.trace.schema import Accounting, Trace
from tests.support.loadgen.mock import mock_in_thread
from tests.support.loadgen.virtual_time import START_NS, run_in_virtual_time

APIS = ["grpc", "completions"]
MS = 1_000_000
TTFT_MS, ITL_MS = 50, 10


def workload(count: int, rate: float, output_tokens: int) -> Trace:
    numbers = np.arange(count)
    return Trace(
        name="made up",
        format="jsonl",
        digest="d" * 64,
        arrival_s=numbers / rate,
        input_tokens=np.full(count, 30),
        output_tokens=np.full(count, output_tokens),
        rows=numbers,
        accounting=Accounting(count),
    )


def messages_ns(run: RunData, index: int) -> list[tuple[int, int]]:
    """Time and tokens of each message of a request."""
    ours = run.chunks[run.chunks["request"] == index]
    return list(zip(ours["arrived_ns"].tolist(), ours["tokens"].tolist(), strict=True))


@pytest.mark.parametrize("tokens_per_message", [1, 4])
@pytest.mark.parametrize("api", APIS)
def test_known_latencies_are_recovered_exactly(api: Any, tokens_per_message: int) -> None:
    behaviour = MockBehaviour(ttft_s=TTFT_MS / 1e3, itl_s=ITL_MS / 1e3, tokens_per_message=tokens_per_message)
    run, record = run_in_virtual_time(api, behaviour, workload(60, 20, 21))
    assert (run.requests["status"] == Status.OK).all()
    scheduled_ns = [50 * MS * index for index in range(60)]
    assert run.requests["scheduled_ns"].tolist() == run.requests["sent_ns"].tolist() == scheduled_ns
    assert [seen.arrived_ns - START_NS for seen in record.answered()] == scheduled_ns
    steps = range(0, 21, tokens_per_message)
    for index, due_ns in enumerate(scheduled_ns):
        assert messages_ns(run, index) == [
            (due_ns + (TTFT_MS + ITL_MS * step) * MS, tokens_per_message if step else 1) for step in steps
        ]
    samples = samples_of(run)
    for latency in (samples.ttft, samples.service_ttft):
        assert latency == pytest.approx(np.full(60, TTFT_MS))
    for latency in (samples.e2e, samples.service_e2e):
        assert latency == pytest.approx(np.full(60, TTFT_MS + 20 * ITL_MS))
    assert samples.tpot == pytest.approx(np.full(60, ITL_MS))
    assert samples.ttst == pytest.approx(np.full(60, ITL_MS * tokens_per_message))
    num_gaps = 60 * (len(steps) - 1)
    assert samples.gaps.ms == pytest.approx(np.full(num_gaps, ITL_MS * tokens_per_message))
    assert samples.gaps.per_token_ms == pytest.approx(np.full(num_gaps, ITL_MS))


@pytest.mark.parametrize("api", APIS)
def test_a_stall_is_seen_by_every_request_that_was_due_meanwhile(api: Any) -> None:
    """Open loop: requests are sent while the server stalls, and their latency is the rest of the stall."""
    behaviour = MockBehaviour(ttft_s=0.005, itl_s=0.0, stall_at_s=1.0, stall_s=1.0)
    run, record = run_in_virtual_time(api, behaviour, workload(300, 100, 6))
    assert record.stall == (START_NS + 1000 * MS, START_NS + 2000 * MS)
    samples = samples_of(run)
    assert samples.client_wait.tolist() == [0.0] * 300
    due_ms = 10 * np.arange(300)
    left_ms = np.where((due_ms >= 1000) & (due_ms < 2000), 2000 - due_ms, 0)
    assert samples.ttft == pytest.approx(5 + left_ms)
    assert samples.service_ttft == pytest.approx(5 + left_ms)


@pytest.mark.parametrize("api", APIS)
def test_a_cap_hides_a_stall_from_service_times_but_not_from_scheduled_ones(api: Any) -> None:
    """Coordinated omission: two requests are in flight when the server stalls, a hundred wait for them here."""
    behaviour = MockBehaviour(ttft_s=0.005, itl_s=0.0, stall_at_s=1.0, stall_s=1.0)
    run, record = run_in_virtual_time(api, behaviour, workload(400, 100, 6), max_concurrency=2)
    assert record.max_open == 2
    samples = samples_of(run)
    index, due_ms = np.arange(400), 10.0 * np.arange(400)
    sent_ms = np.maximum(due_ms, np.where(index < 102, 0, 2005 + 5 * ((index - 102) // 2)))  # two every 5 ms
    stalled_ms = np.where(index == 100, 1000, np.where(index == 101, 990, 0))
    assert samples.service_ttft == pytest.approx(5 + stalled_ms)
    assert samples.ttft == pytest.approx(sent_ms - due_ms + 5 + stalled_ms)
    assert (samples.ttft > 100).sum() == 121


@pytest.mark.parametrize("api", APIS)
def test_a_capped_run_counts_its_own_queueing(api: Any) -> None:
    """Twice the load that the cap lets through: each request waits longer than the one before."""
    behaviour = MockBehaviour(ttft_s=0.05, itl_s=0.01)
    run, _ = run_in_virtual_time(api, behaviour, workload(80, 40, 6), max_concurrency=2)
    samples = samples_of(run)
    free_at_ms, expected_ms = [0.0, 0.0], []
    for due_ms in 25.0 * np.arange(80):  # brute force: two slots, a tenth of a second each, first come first served
        slot = int(np.argmin(free_at_ms))
        free_at_ms[slot] = max(free_at_ms[slot], due_ms) + 100
        expected_ms.append(free_at_ms[slot] - due_ms)
    assert expected_ms[-1] > 2000
    assert samples.e2e == pytest.approx(np.array(expected_ms))
    assert samples.ttft == pytest.approx(np.array(expected_ms) - 50)
    assert samples.client_wait == pytest.approx(np.array(expected_ms) - 100, abs=1e-6)
    assert samples.service_ttft == pytest.approx(np.full(80, 50.0))
    assert samples.service_e2e == pytest.approx(np.full(80, 100.0))


@pytest.mark.parametrize("tokens_per_message", [1, 4])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.sampled
def test_a_real_run_sees_every_message_and_none_before_it_was_sent(api: Any, tokens_per_message: int) -> None:
    behaviour = MockBehaviour(ttft_s=TTFT_MS / 1e3, itl_s=ITL_MS / 1e3, tokens_per_message=tokens_per_message)
    with mock_in_thread("grpc" if api == "grpc" else "openai", behaviour) as server:
        run = run_workload(workload(20, 50, 21), TargetSpec(server.url, api))
        start_ns = run.settings["start_monotonic_ns"]
        first_sent_ns = sorted(seen.first_ns - start_ns for seen in server.record.answered())
        ended_ns = sorted(seen.ended_ns - start_ns for seen in server.record.answered())
    rows = run.requests
    assert (rows["status"] == Status.OK).all()
    assert (rows["num_tokens"] == 21).all()
    assert (rows["num_chunks"] == 1 + 20 / tokens_per_message).all()
    assert (rows["scheduled_ns"] <= rows["sent_ns"]).all()
    assert (np.sort(rows["first_ns"]) >= first_sent_ns).all()
    assert (np.sort(rows["ended_ns"]) >= ended_ns).all()
    assert (rows["first_ns"] - rows["sent_ns"] >= (TTFT_MS - 1) * MS).all()  # the server may be a millisecond early
    assert (rows["last_ns"] - rows["sent_ns"] >= (TTFT_MS + 20 * ITL_MS - 1) * MS).all()
