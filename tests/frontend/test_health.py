import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.api.grpc.server import SERVICE_NAME
from frontend.health import Health
from frontend.testing.fake_engine import FakeEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(stub, service):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_process_is_alive_and_service_waits_for_its_engine(make_pair):
    pair = await make_pair(engine=FakeEngine(state=engine_pb.ENGINE_STATE_LOADING), wait=False)
    stub = HealthStub(pair.channel())
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    assert await check(stub, SERVICE_NAME) == NOT_SERVING
    await pair.engine.wait_for(lambda: pair.engine.num_sessions == 1)
    pair.engine.set_state(engine_pb.ENGINE_STATE_SERVING)
    assert (await watch.read()).status == SERVING
    pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    assert (await watch.read()).status == NOT_SERVING
    pair.engine.set_state(engine_pb.ENGINE_STATE_SERVING)
    assert (await watch.read()).status == SERVING
    await pair.engine.kill()
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    watch.cancel()


async def test_unknown_service(pair):
    stub = HealthStub(pair.channel())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(stub, "nobody")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_watchers_are_told_after_one_of_them_has_left(pair):
    stub = HealthStub(pair.channel())
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME)) for _ in range(3)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    watches[1].cancel()
    await asyncio.gather(watches[1].code())
    pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    for watch in (watches[0], watches[2]):
        assert (await asyncio.wait_for(watch.read(), 10)).status == NOT_SERVING
        watch.cancel()


async def test_draining_frontend_is_not_serving(pair):
    stub = HealthStub(pair.channel())
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await watch.read()).status == SERVING
    assert await pair.app.drain(1.0) == 0
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    watch.cancel()


async def test_change_between_looking_and_waiting_is_not_missed():
    health = Health("s")
    waiters = [asyncio.create_task(health.wait_for_change()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()  # one who leaves takes nobody along
    health.set_serving(True)
    await asyncio.wait_for(waiters[1], 5)
    assert health.serving
