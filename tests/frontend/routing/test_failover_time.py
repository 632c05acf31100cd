"""Failover and time: deadlines, time budgets and latency targets go on running while a request moves."""

import asyncio
import time

import grpc

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing import wire
from frontend.routing.pending import PendingRequest
from frontend.routing.stream import CancelReason
from tests.support.frontend.accounts import check_account
from tests.support.frontend.fake_engine import paused_engine

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so."


async def test_a_moved_request_carries_the_time_that_is_left_of_its_targets(skip, make_world):
    world = await make_world(2, make_engine=paused_engine, heartbeat_timeout_s=600)
    spec = pb.GenerationSpec(text="abc")
    spec.latency_targets.ttft.seconds = 1000
    spec.latency_targets.inter_token.seconds = 60
    call = asyncio.ensure_future(world.stub.Generate(pb.GenerateRequest(spec=spec)))
    index = await world.held()
    (first,) = world.engines[index].submissions
    skip(300)
    await world.kill(index)
    (other,) = world.engines.values()
    await other.wait_for(lambda: other.num_open == 1)
    (moved,) = other.submissions
    assert 990_000 < first.ttft_remaining_ms <= 1_000_000
    assert 690_000 < moved.ttft_remaining_ms <= 700_000
    assert (moved.epoch, moved.inter_token_us) == (1, 60_000_000)
    other.resume()
    await call


async def test_a_moved_request_is_late_after_its_first_token_was_due(skip, make_world):
    world = await make_world(2, make_engine=paused_engine, heartbeat_timeout_s=600)
    spec = pb.GenerationSpec(text="abc")
    spec.latency_targets.ttft.seconds = 10
    call = asyncio.ensure_future(world.stub.Generate(pb.GenerateRequest(spec=spec)))
    index = await world.held()
    skip(20)
    await world.kill(index)
    (other,) = world.engines.values()
    await other.wait_for(lambda: other.num_open == 1)
    (moved,) = other.submissions
    assert moved.HasField("ttft_remaining_ms")
    assert moved.ttft_remaining_ms == 0
    other.resume()
    await call


async def test_deadline_and_time_budget_apply_in_the_failover_queue(skip, make_world, read):
    world = await make_world(1, make_engine=paused_engine, failover_timeout_s=300)
    late = read(world, TEXT, timeout=20)
    cut = read(world, TEXT, time_budget={"seconds": 20})
    engine = world.engines[0]
    await engine.wait_for(lambda: engine.num_open == 2)
    for _ in range(3):
        await engine.step()
    await world.until(lambda: len(cut.token_ids) == 3)
    await world.kill(0)
    assert world.app.engines.num_waiting == 2
    skip(21.0)
    assert (await late.end()).error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    (finished,) = (await cut.end()).finished
    assert finished.reason == pb.FINISH_REASON_TIME_BUDGET
    assert finished.usage.num_output_tokens == 3
    check_account(finished)


async def test_next_engine_gets_the_remaining_deadline_and_time_budget(skip, make_world, read):
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT, timeout=30, time_budget={"seconds": 20})
    index = await world.held()
    first = world.engines[index].submissions[0]
    skip(0.05)
    await world.kill(index)
    (other,) = world.engines.values()
    await other.wait_for(lambda: other.num_open == 1)
    (moved,) = other.submissions
    assert 0 < moved.remaining_ms <= first.remaining_ms - 50
    assert 0 < moved.stops.time_budget_ms <= first.stops.time_budget_ms - 50
    assert (first.waited_ms, moved.waited_ms >= 50) == (0, True)
    assert (moved.sampling, moved.stops.max_tokens) == (first.sampling, first.stops.max_tokens)
    other.resume()
    await reading.end()


async def test_a_new_request_that_waited_for_an_engine_gets_the_time_that_is_left(skip, make_world):
    """Its engine was lost between its check and its submission: no engine has taken it yet."""
    world = await make_world(1, make_engine=paused_engine, failover_timeout_s=300)
    router = world.app.engines
    model = router.attachment().model
    await world.kill(0)
    submission = engine_pb.Submission(
        prompt_ids=wire.ids_to_bytes([97]),
        stops=engine_pb.TokenStops(max_tokens=4, time_budget_ms=60_000),
        remaining_ms=90_000,
        ttft_remaining_ms=30_000,
    )
    request = PendingRequest(submission, model.key, window=4, now_s=time.monotonic())
    assert router.submit(request) is None
    skip(20)
    engine = await world.start(0)
    await engine.wait_for(lambda: engine.num_open == 1)
    (late,) = engine.submissions
    assert late.epoch == 0
    assert late.remaining_ms <= 70_000
    assert late.stops.time_budget_ms <= 40_000
    assert late.ttft_remaining_ms <= 10_000
    assert late.waited_ms >= 20_000
    request.stream.close(CancelReason.CLIENT)
