"""An engine whose grpc.health.v1 says NOT_SERVING, although it is healthy, gets no requests: it warms up or stops."""

import logging

import pytest

from chairlift.service.health import Health
from tests.support.frontend.foreign_answers import answer_to
from tests.support.frontend.foreign_engine import ForeignEngine

SERVICES = {
    "vllm": "vllm.grpc.engine.VllmEngine",
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "trtllm": "trtllm.TrtllmService",
}
TEXT = "The quick brown fox"


@pytest.mark.parametrize("kind", SERVICES)
async def test_an_engine_gets_requests_once_it_serves(make_foreign, read, encode, kind, caplog):
    caplog.set_level(logging.INFO)
    health = Health(SERVICES[kind])
    world = await make_foreign(ForeignEngine(kind=kind, health=health), usable=0)
    await world.until(lambda: "not ready, its health service says NOT_SERVING" in caplog.text)
    health.set_serving(True)
    await world.until_usable(1)
    await read(world, TEXT, max_tokens=20).complete(answer_to(encode(TEXT), 20))


@pytest.mark.parametrize("kind", SERVICES)
async def test_an_engine_that_stops_serving_ends_its_requests_and_gets_no_more(make_foreign, read, encode, kind):
    stopping, other = (ForeignEngine(kind=kind, health=Health(SERVICES[kind])) for _ in range(2))
    stopping.health.set_serving(True)
    stopping.pause()
    world = await make_foreign(stopping, other, usable=1)
    reading = read(world, TEXT, max_tokens=20)
    assert await world.holder() is stopping
    other.health.set_serving(True)
    await world.until_usable(2)
    stopping.health.set_serving(False)
    await world.until_usable(1)
    for _ in range(2):
        await read(world, TEXT, max_tokens=20).complete(answer_to(encode(TEXT), 20))
    assert (len(stopping.requests), len(other.requests)) == (1, 2)
    stopping.resume()
    await reading.complete(answer_to(encode(TEXT), 20))
    stopping.health.set_serving(True)
    await world.until_usable(2)


async def test_an_engine_whose_health_service_does_not_know_the_name_serves(make_foreign, read, encode):
    world = await make_foreign(ForeignEngine(health=Health("another.Service")))
    await read(world, TEXT, max_tokens=20).complete(answer_to(encode(TEXT), 20))
