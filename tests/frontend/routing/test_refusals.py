"""Requests that an engine rejects or drops: which engine is tried next, and for how long."""

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine, paused_engine, rejection

TEXT = "The quick brown fox."
FULL = engine_pb.REJECTION_REASON_QUEUE_FULL
DRAINING = engine_pb.REJECTION_REASON_DRAINING


class AlwaysFull(FakeEngine):
    """An engine that rejects all requests."""

    def _submit(self, session, batch):
        self.rejections = [rejection(FULL, "full") for _ in batch.submissions]
        super()._submit(session, batch)


async def test_new_request_rejected_by_a_full_queue_goes_to_another_engine(make_world, read, ids):
    world = await make_world(3)
    engines = list(world.engines.values())
    for engine in engines[:2]:
        engine.rejections = [rejection(FULL, "full")]
    finished = await read(world, TEXT).complete(ids(TEXT))
    assert [len(engine.submissions) for engine in engines] == [1, 1, 1]
    assert all(engine.submissions[0].epoch == 0 for engine in engines)  # no engine took it before
    assert finished.timing.moved.ToMicroseconds() == 0
    assert world.app.engines.num_waiting == 0


async def test_new_request_is_rejected_after_each_engine_rejected_it_once(make_world, read):
    world = await make_world(2, make_engine=AlwaysFull)
    reading = await read(world, TEXT).end()
    assert reading.error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [len(engine.submissions) for engine in world.engines.values()] == [1, 1]


async def test_second_answer_rejected_by_a_full_queue_goes_to_another_engine(make_world, text_request, ids):
    world = await make_world(2, make_engine=paused_engine)
    request = text_request(TEXT, output=pb.OutputOptions(token_ids=True), max_tokens=100)
    request.spec.num_answers = 2
    call = world.stub.StreamGenerate(request)
    first = await world.held()
    for engine in world.engines.values():
        engine.rejections = [rejection(FULL, "full")]
    world.engines[1 - first].rejections = []
    for engine in world.engines.values():
        engine.resume()
    tokens = {0: [], 1: []}
    async for message in call:
        tokens[message.chunk.answer_index] += message.chunk.token_ids
    assert tokens == {0: ids(TEXT), 1: ids(TEXT)}


async def test_engine_that_rejected_because_it_drains_is_not_tried_again(make_world, read, ids):
    """As on the real wire, the rejection arrives before the message that the engine drains."""
    world = await make_world(2)
    engines = list(world.engines.values())
    engines[0].rejections = [rejection(DRAINING, "draining") for _ in range(3)]
    await read(world, TEXT).complete(ids(TEXT))
    assert [len(engine.submissions) for engine in engines] == [1, 1]


async def test_request_that_all_engines_reject_waits_no_longer_than_the_failover_timeout(skip, make_world, read):
    world = await make_world(2, failover_timeout_s=100.0)
    for engine in world.engines.values():
        engine.pause()
    reading = read(world, TEXT)
    index = await world.held()
    (other,) = [engine for number, engine in world.engines.items() if number != index]
    other.rejections = [rejection(FULL, "full") for _ in range(1000)]
    await world.kill(index)
    await world.until(lambda: len(other.submissions) >= 2)
    skip(100.0)
    await reading.end()
    assert reading.error.code() is grpc.StatusCode.UNAVAILABLE  # not RESOURCE_EXHAUSTED, because it was accepted


async def test_started_answer_that_no_engine_takes_is_not_restarted(make_world, text_request, ids):
    """The second of two answers loses its engine and is rejected until the timeout: no token is sent twice."""
    world = await make_world(2, make_engine=paused_engine, failover_timeout_s=0.1)
    request = text_request(TEXT, output=pb.OutputOptions(token_ids=True), max_tokens=100)
    request.spec.num_answers = 2
    call = world.stub.StreamGenerate(request)
    first = await world.held()
    other = 1 - first
    await world.engines[first].step()
    await world.until(lambda: world.engines[other].num_open == 1)
    for _ in range(3):
        await world.engines[other].step()
    requests = world.app.engines._connections[world.addresses[other]].attachment.session._open
    await world.until(lambda: [request.stream.num_tokens for request in requests.values()] == [3])
    world.engines[first].rejections = [rejection(FULL, "full") for _ in range(1000)]
    await world.kill(other)
    seen = {0: 0, 1: 0}

    async def follow():
        async for message in call:
            if message.HasField("chunk"):
                assert message.chunk.first_token_index == seen[message.chunk.answer_index]
                seen[message.chunk.answer_index] += message.chunk.num_tokens

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await follow()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_rolling_restart_suspects_no_request(make_world, read, ids, scrape):
    """Draining engines drop a request repeatedly, although little was computed: it is not suspected as poison."""
    world = await make_world(2, make_engine=paused_engine, max_moves=1)
    reading = read(world, TEXT)
    for _ in range(3):
        index = await world.held()
        engine = world.engines[index]
        engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
        await world.until_usable(1)
        for session in engine._sessions:
            for request in session.requests.values():
                request.cancelled = True
        await engine.step()
        other = world.engines[1 - index]
        await other.wait_for(lambda other=other: other.num_open == 1)  # the first engine has dropped it
        await world.kill(index)
        await world.start(index)
        await world.until_usable(2)
    for engine in world.engines.values():
        engine.resume()
    await reading.complete(ids(TEXT))
    assert sum(scrape(world.app.metrics, "chairlift:requests_lost_engine_total", "engine").values()) == 3


async def test_failover_timeout_restarts_after_an_engine_took_the_request(skip, make_world, read, ids):
    """Time at an engine does not count as waiting."""
    world = await make_world(1, make_engine=paused_engine, failover_timeout_s=10.0)
    reading = read(world, TEXT)
    for _ in range(2):
        await world.held()
        skip(11.0)  # must not count
        await world.kill(0)
        await world.start(0)
    world.engines[0].resume()
    await reading.complete(ids(TEXT))
