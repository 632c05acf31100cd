"""Metrics of several workers: each worker reports the sums over all, including workers that have died."""

import asyncio
import json
import os
import signal

import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.hang import HANG_S

STOPPED = ("chairlift:request_success_total", (("engine", "0"), ("finished_reason", "stop"), ("model_name", "fake")))
LABELS = (("engine", "0"), ("model_name", "fake"))


@pytest.fixture(autouse=True)
async def bound():
    """Limits every wait for the processes."""
    async with asyncio.timeout(HANG_S):
        yield


async def send(frontend, num_requests):
    """Sends half of the requests over HTTP and half over gRPC, each on its own connection."""
    body = json.dumps({"prompt": "abcd"}).encode()
    await asyncio.gather(
        *(frontend.generate("abcd") for _ in range(num_requests // 2)),
        *(frontend.http("/v1/completions", body) for _ in range(num_requests // 2)),
    )


async def settled(frontend, num_requests):
    """Waits until all requests are counted; checks that every one of several scrapes shows them all."""
    await frontend.reaches("chairlift:request_success_total", num_requests)
    # The engine's accounting of a request may arrive after the end of the request.
    await frontend.reaches("chairlift:request_num_preemptions_count", num_requests)
    await frontend.reaches("chairlift:request_inference_time_seconds_count", num_requests)
    for samples in await asyncio.gather(*(frontend.scrape() for _ in range(6))):
        assert samples[STOPPED] == num_requests
        assert samples["chairlift:requests_received_total", ()] == num_requests
        assert samples["chairlift:prompt_tokens_total", LABELS] == 4 * num_requests
        assert samples["chairlift:request_prompt_tokens_sum", LABELS] == 4 * num_requests
        assert samples["chairlift:frontend_queue_requests", ()] == 0
        assert samples["chairlift:requests_without_engine", ()] == 0
        assert samples["chairlift:engine_up", (("engine", "0"),)] == 1
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            buckets = [
                value
                for (found, labels), value in samples.items()
                if found == f"chairlift:{name}_bucket" and dict(labels)["le"] == "+Inf"
            ]
            assert buckets == [num_requests]
            assert samples[f"chairlift:{name}_count", LABELS] == num_requests


async def test_totals_include_the_requests_before_and_after_a_worker_was_killed(start):
    frontend = await start(num_workers=3, http=True)
    await send(frontend, 40)
    assert sum(count > 1 for count in frontend.engine.command_counts) > 1, "one worker got all requests"
    await settled(frontend, 40)
    victim = frontend.worker_pids()[0]
    os.kill(victim, signal.SIGKILL)
    await frontend.logged("replacing it in")
    for samples in [await frontend.scrape() for _ in range(5)]:  # before it is replaced
        assert samples[STOPPED] == 40
    await frontend.logged("listening on", 4)
    await send(frontend, 40)
    await settled(frontend, 80)


async def test_queues_are_summed_without_those_of_dead_workers(start):
    frontend = await start(http=True)
    frontend.engine.pause()
    calls = [asyncio.ensure_future(frontend.generate("abc")) for _ in range(20)]
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == 20)
    assert all(count > 1 for count in frontend.engine.command_counts)
    samples = await frontend.scrape()
    assert samples["chairlift:frontend_queue_requests", ()] == 20
    assert samples["chairlift:frontend_queue_tokens", ()] == 60
    os.kill(frontend.worker_pids()[0], signal.SIGKILL)
    await frontend.engine.wait_for(lambda: frontend.engine.num_sessions == 1)
    await frontend.logged("replacing it in")
    left = frontend.engine.num_open
    assert 0 < left < 20
    assert await frontend.total("chairlift:frontend_queue_requests") == left
    await frontend.logged("listening on", 3)
    assert await frontend.total("chairlift:frontend_queue_requests") == left
    frontend.engine.resume()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results.count("abc") == left
    await frontend.reaches("chairlift:frontend_queue_requests", 0)


async def test_engine_metrics_are_reported_once_and_process_metrics_for_each_worker(start):
    frontend = await start(http=True)
    frontend.engine.load = engine_pb.LoadStats(num_running=7, num_waiting=3, num_preemptions_total=11)
    await send(frontend, 10)
    await frontend.reaches("chairlift:num_requests_running", 7)
    # Each worker receives the engine's load separately, with its next message.
    while {(await frontend.scrape()).get(("chairlift:num_preemptions_total", LABELS)) for _ in range(10)} != {11}:
        await asyncio.sleep(0.01)
    samples = await frontend.scrape()
    assert samples["chairlift:num_requests_waiting", LABELS] == 3
    assert samples["chairlift:num_requests_running", LABELS] == 7
    seconds = {labels: value for (name, labels), value in samples.items() if name == "process_cpu_seconds_total"}
    assert set(seconds) == {(("worker", "0"),), (("worker", "1"),)}
    assert min(seconds.values()) > 0
