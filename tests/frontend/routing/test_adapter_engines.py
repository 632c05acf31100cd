"""Requests for an adapter that only one of two engines has."""

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S

CLASSES = '[classes.fast]\nttft_ms = 1000\nwhen_infeasible = "refuse"\n'


@pytest.fixture
def make(make_world):
    """make(...) -> a world whose engine 0 has the adapter "a", by a flag, so that no other engine gets it."""

    async def make_with_adapter(**config):
        world = await make_world(2, absent=2, **config)
        await world.start(0, adapters={"a": ""})
        await world.start(1)
        await world.until_usable(2)
        return world

    return make_with_adapter


def generate(world, model, text="abc", **spec):
    return world.stub.Generate(
        pb.GenerateRequest(spec=pb.GenerationSpec(model=model, text=text, **spec)), timeout=HANG_S
    )


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_requests_for_an_adapter_are_unavailable_while_its_engine_restarts(make):
    world = await make()
    await world.kill(0)
    error = await refused(generate(world, "a"))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no engine with adapter 'a' is attached")
    assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    assert list((await world.stub.GetModel(pb.GetModelRequest(), timeout=HANG_S)).adapters) == []
    assert (await refused(generate(world, "b"))).code() is grpc.StatusCode.NOT_FOUND
    await world.start(0, adapters={"a": ""})
    await world.until_usable(2)
    assert (await generate(world, "a")).text == "abc"
    await world.kill(0)
    await world.start(0)  # without its flag
    await world.until_usable(2)
    assert (await refused(generate(world, "a"))).code() is grpc.StatusCode.NOT_FOUND


async def test_a_first_token_is_predicted_by_the_engine_that_has_the_adapter(make, tmp_path):
    (tmp_path / "classes.toml").write_text(CLASSES)
    world = await make(service_classes=tmp_path / "classes.toml")
    for engine, num_tokens in ((world.engines[0], 1000), (world.engines[1], 0)):
        engine.load = engine_pb.LoadStats(prompt_tokens_per_second=100.0, lane_tokens=[num_tokens], step_us=1000)
    await world.until(lambda: world.app.engines.forecast(0.0).tokens_per_second == 200)
    fast = pb.LatencyTargets(service_class="fast")
    assert (await generate(world, "", latency_targets=fast)).text == "abc"
    error = await refused(generate(world, "a", latency_targets=fast))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the first token would come after about 10" in error.details()


async def test_an_engine_that_stalls_keeps_requests_that_no_other_one_can_take(make):
    world = await make()
    first = world.engines[0]
    first.freeze()
    answering = generate(world, "a")
    await first.wait_for(lambda: first.num_open == 1)
    connection = world.app.engines._connections[first.address]
    first.is_stalled, num_messages = True, connection._num_messages
    await world.until(lambda: connection._num_messages > num_messages + 2 or not connection.serving)
    assert connection.serving
    first.is_stalled = False
    first.thaw()
    assert (await answering).text == "abc"
    assert len(first.submissions) == 1
