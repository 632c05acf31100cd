"""grpc.health.v1 over a real channel: the servicer, and List of both servers."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.service.health import Health, HealthListRequest, HealthListResponse, add_health, list_response
from frontend.api.grpc.server import SERVICE_NAME
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.engine.fake_engine import fake_engine_parts, run_engine

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def listed(address: str) -> dict[str, int]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            request_serializer=HealthListRequest.SerializeToString,
            response_deserializer=HealthListResponse.FromString,
        )
        response = await call(HealthListRequest())
    return {name: each.status for name, each in response.statuses.items()}


async def test_the_frontend_lists_itself_and_its_service() -> None:
    app = FrontendApp(FrontendConfig(port=0, http=False, engine=("127.0.0.1:1",)))
    await app.start()
    try:
        assert await listed(f"127.0.0.1:{app.port}") == {"": SERVING, SERVICE_NAME: NOT_SERVING}
    finally:
        await app.stop()


async def test_the_engine_lists_itself_and_its_service() -> None:
    async with run_engine(fake_engine_parts()) as server:
        statuses = await listed(server.address)
    assert statuses.keys() == {"", "chairlift.engine.v1.EngineService"}
    assert set(statuses.values()) == {SERVING}


def test_the_wire_is_that_of_the_public_proto() -> None:
    response = list_response({"a": SERVING})
    # map<string, HealthCheckResponse> statuses = 1: an entry with key = 1 and value = 2, whose status = 1
    assert response.SerializeToString() == b"\x0a\x07\x0a\x01a\x12\x02\x08\x01"


async def test_change_between_reading_and_waiting_is_not_missed() -> None:
    health = Health("s")
    waiters = [asyncio.create_task(health.wait_for_change()) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()  # a waiter that leaves takes no other with it
    health.set_serving(True)
    await asyncio.wait_for(waiters[1], HANG_S)
    assert health.serving


@pytest.mark.parametrize("follows", [False, True])
async def test_every_watcher_sees_every_change_until_the_close(follows: bool) -> None:
    health = Health("s", process_status_follows=follows)
    server = grpc.aio.server()
    add_health(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = HealthStub(channel)
        for name in ("s", ""):
            watches = [stub.Watch(HealthCheckRequest(service=name)) for _ in range(3)]
            before = NOT_SERVING if name or follows else SERVING
            assert [(await watch.read()).status for watch in watches] == [before] * 3
            watches.pop(1).cancel()  # one that leaves takes no other with it
            health.set_serving(True)
            assert (await stub.Check(HealthCheckRequest(service=name))).status == SERVING
            if before != SERVING:
                assert [(await asyncio.wait_for(watch.read(), HANG_S)).status for watch in watches] == [SERVING] * 2
            health.set_serving(False)
            assert (await stub.Check(HealthCheckRequest(service=name))).status == before
            for watch in watches:
                watch.cancel()
        watch, unknown = (stub.Watch(HealthCheckRequest(service=name)) for name in ("s", "nobody"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await unknown.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        health.close()
        for each in (watch, unknown):
            assert await asyncio.wait_for(each.read(), HANG_S) is grpc.aio.EOF
    await server.stop(None)
