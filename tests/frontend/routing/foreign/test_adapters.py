"""Adapters that are loaded at run time, beside engines that cannot be given any."""

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine

KINDS = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("kind", KINDS)
async def test_loading_is_refused_and_undone_in_the_engines_that_can(make_foreign, kind):
    own = FakeEngine()
    world = await make_foreign(own, kind, allow_runtime_lora_updating=True)
    code, details = await refused(world.stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="path")))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{KINDS[kind]} engines do not load adapters here" in details
    assert "loaded and unloaded again" in details
    assert own.adapters == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_loading_into_such_an_engine_alone_is_refused(make_foreign, kind):
    world = await make_foreign(kind, allow_runtime_lora_updating=True)
    assert await refused(world.stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="path"))) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{KINDS[kind]} engines do not load adapters here",
    )
