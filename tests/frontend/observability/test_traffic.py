"""The throughput log line: the traffic of an interval, worded like the engine's, and no line without traffic."""

import asyncio
import logging

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.request_events import RequestProgress
from frontend.observability.traffic import MAX_FIRST_TOKENS, Traffic
from tests.hang import HANG_S


@pytest.fixture
def log(caplog):
    """log(pair) logs the traffic as of an interval of 2 s; returns all records so far."""
    caplog.set_level(logging.INFO, "frontend.throughput")

    def read(pair):
        pair.app.metrics.requests.traffic.log(2.0)
        return [record for record in caplog.records if record.name == "frontend.throughput"]

    return read


async def test_traffic_is_logged_once(pair, text_request, log):
    for text in ("abc", "defgh"):
        await pair.stub().Generate(pb.GenerateRequest(spec=text_request(text).spec))
    refused = text_request("abc")
    refused.spec.model = "another"
    with pytest.raises(grpc.aio.AioRpcError):
        await pair.stub().Generate(pb.GenerateRequest(spec=refused.spec))
    await pair.idle()
    (line,) = log(pair)
    assert line.getMessage().startswith(
        "Avg prompt throughput: 4.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 0 reqs, "
        "Waiting: 0 reqs, Finished: 2 reqs, Rejected: 1 reqs, TTFT p50: "
    )
    assert line.num_finished == 2
    assert len(log(pair)) == 1  # no traffic since


async def test_requests_wait_until_their_first_token_and_run_until_they_end(pair, text_request, log):
    pair.engine.pause()
    call = pair.stub().StreamGenerate(text_request("abc"))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    waiting = log(pair)[-1]
    assert (waiting.num_waiting, waiting.num_running, waiting.ttft_p50_s) == (1, 0, None)
    await pair.engine.step()
    await call.read()
    await call.read()
    traffic = pair.app.metrics.requests.traffic
    async with asyncio.timeout(HANG_S):
        while not traffic.num_output_tokens:
            await asyncio.sleep(0)
    running = log(pair)[-1]
    assert (running.num_waiting, running.num_running) == (0, 1)
    assert running.ttft_p50_s > 0
    call.cancel()
    await pair.engine.wait_for(lambda: pair.engine.cancels)
    pair.engine.resume()
    await pair.idle()
    ended = log(pair)[-1]
    assert (ended.num_running, ended.num_finished) == (0, 1)


async def test_line_is_logged_at_the_interval_and_never_with_0(make_pair, text_request, caplog):
    caplog.set_level(logging.INFO, "frontend.throughput")
    off, on = await make_pair(log_stats_interval_s=0.0), await make_pair(log_stats_interval_s=0.001)
    for pair in (off, on):
        await pair.stub().Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    async with asyncio.timeout(HANG_S):
        while not caplog.records:
            await asyncio.sleep(0)
    assert off.app._traffic_log is None


def test_times_to_first_token_are_bounded_without_lines(caplog):
    caplog.set_level(logging.INFO, "frontend.throughput")
    traffic = Traffic()
    for ttft_s in [5.0] * MAX_FIRST_TOKENS + [2.0] * MAX_FIRST_TOKENS:
        request = RequestProgress(0.0, streamed=True)
        traffic.accepted(request, str)
        request.first_token_at_s = request.accepted_at_s + ttft_s
        traffic.started(request, pb.Started())
    assert len(traffic.first_token_s) == MAX_FIRST_TOKENS
    traffic.log(1.0)
    assert caplog.records[-1].ttft_p50_s == 2.0
