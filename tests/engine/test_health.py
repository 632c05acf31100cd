"""grpc.health.v1 of an engine, over a real channel."""

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from engine.core.outputs import SchedulerOutput
from engine.interfaces import EngineState
from engine.serving.listener import Listener
from engine.serving.server import SERVICE_NAME, EngineService
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("name", ["", SERVICE_NAME])
async def test_an_engine_is_healthy_from_the_end_of_its_load_until_it_drains(name: str) -> None:
    async with run_engine(fake_engine_parts()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = HealthStub(channel)
        watch = stub.Watch(HealthCheckRequest(service=name))
        while (await watch.read()).status != SERVING:
            pass
        assert (await stub.Check(HealthCheckRequest(service=name))).status == SERVING
        server.engine.drain(5.0)
        assert (await asyncio.wait_for(watch.read(), HANG_S)).status == NOT_SERVING


async def test_an_engine_that_drains_is_not_healthy_while_requests_still_run() -> None:
    steps, has_step = threading.Semaphore(0), threading.Event()

    def on_step(_plan: SchedulerOutput) -> None:
        has_step.set()
        assert steps.acquire(timeout=HANG_S)

    async with (
        run_engine(fake_engine_parts(on_step=on_step)) as server,
        AttachClient.open(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = HealthStub(channel)
        watch = stub.Watch(HealthCheckRequest())
        while (await watch.read()).status != SERVING:
            pass
        await client.submit(submission(1, [1], 3))
        await asyncio.to_thread(has_step.wait)
        server.engine.drain(20.0)
        steps.release()  # one, after which the drain is seen; the next step waits
        assert (await asyncio.wait_for(watch.read(), HANG_S)).status == NOT_SERVING
        assert (await stub.Check(HealthCheckRequest())).status == NOT_SERVING
        steps.release(10)
        assert await asyncio.wait_for(watch.read(), HANG_S) is grpc.aio.EOF


async def test_an_engine_that_has_failed_is_not_healthy_while_it_still_answers() -> None:
    service = EngineService()
    listener = Listener(service, "127.0.0.1:0")
    await listener.start()
    service._set_state(EngineState.SERVING, "")
    async with grpc.aio.insecure_channel(listener.address) as channel:
        stub = HealthStub(channel)
        watch = stub.Watch(HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        service.fail("step failed: the device is gone")
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(HealthCheckRequest())).status == NOT_SERVING
        await asyncio.wait_for(listener.stop(60), HANG_S)
        assert await watch.read() is grpc.aio.EOF


async def test_an_engine_that_loads_is_not_healthy_and_its_end_ends_a_watch_at_once() -> None:
    listener = Listener(EngineService(), "127.0.0.1:0")
    await listener.start()
    async with grpc.aio.insecure_channel(listener.address) as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        await asyncio.wait_for(listener.stop(60), HANG_S)
        assert await watch.read() is grpc.aio.EOF
