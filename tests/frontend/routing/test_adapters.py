"""Adapters that are loaded and unloaded in several engines while they serve."""

import asyncio
import hashlib

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import fake_adapter, rejection

ALLOWED = {"allow_runtime_lora_updating": True}


def digest_of(path):
    return hashlib.sha256(path.encode()).digest()


async def load(world, name, path, **options):
    return await world.stub.LoadAdapter(pb.LoadAdapterRequest(name=name, path=path, **options), timeout=HANG_S)


async def unload(world, name):
    return await world.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name), timeout=HANG_S)


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def adapters(world):
    return list((await world.stub.GetModel(pb.GetModelRequest(), timeout=HANG_S)).adapters)


def spec(model, text="abc"):
    return pb.GenerateRequest(spec=pb.GenerationSpec(model=model, text=text, stop=pb.StopOptions(max_tokens=2)))


def held(engine):
    return {name: adapter.path for name, adapter in engine.adapters.items()}


async def test_a_server_changes_no_adapters_unless_a_flag_allows_it(make_world):
    world = await make_world(1)
    for call in (load(world, "a", "path"), unload(world, "a")):
        code, detail = await refused(call)
        assert (code, detail) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "this server does not change adapters: start it with --allow-runtime-lora-updating",
        )


async def test_an_adapter_is_loaded_into_all_engines_and_requests_name_it_and_its_digest(make_world):
    world = await make_world(2, **ALLOWED)
    loaded = await load(world, "a", "path")
    assert (loaded.sha256, loaded.num_engines) == (digest_of("path").hex(), 2)
    assert [held(engine) for engine in world.engines.values()] == [{"a": "path"}] * 2
    assert await adapters(world) == ["a"]
    answer = await world.stub.Generate(spec("a"), timeout=HANG_S)
    assert answer.model == "a"
    (submission,) = [one for engine in world.engines.values() for one in engine.submissions]
    assert (submission.adapter, submission.adapter_sha256) == ("a", digest_of("path"))
    assert (await unload(world, "a")).num_engines == 2
    assert await adapters(world) == []
    assert (await refused(world.stub.Generate(spec("a"), timeout=HANG_S)))[0] is grpc.StatusCode.NOT_FOUND
    assert await refused(unload(world, "a")) == (grpc.StatusCode.NOT_FOUND, "lora_name 'a' cannot be found")


async def test_engines_with_different_adapters_serve_the_requests_that_they_can(make_world):
    world = await make_world(2, absent=2)
    await world.start(0, adapters={"a": "one"})
    await world.start(1, adapters={"a": "two", "b": "b"})
    second = world.engines[1]
    second.changes_adapters = False
    await world.until_usable(2)
    assert sorted(await adapters(world)) == ["a", "b"]
    for _ in range(4):
        await world.stub.Generate(spec("b"), timeout=HANG_S)
    assert len(second.submissions) == 4
    for model in ("a",) * 4 + ("",) * 4:
        await world.stub.Generate(spec(model), timeout=HANG_S)
    for engine in world.engines.values():
        for submission in engine.submissions:
            if submission.adapter:
                assert engine.adapters[submission.adapter].sha256 == submission.adapter_sha256


async def test_a_failure_in_one_engine_is_undone_in_the_others_and_says_so(make_world):
    world = await make_world(2, **ALLOWED)
    first, second = world.engines.values()
    second.adapter_error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "--max-loras is 1: 1 adapters are loaded")
    code, detail = await refused(load(world, "a", "path"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert detail == (
        f"{second.address}: --max-loras is 1: 1 adapters are loaded; {first.address}: loaded and unloaded again"
    )
    assert (held(first), held(second)) == ({}, {})
    assert await adapters(world) == []
    second.adapter_error = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    code, detail = await refused(load(world, "a", "path"))
    assert (code, "this engine's version does not load adapters" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    second.adapter_error = None
    await load(world, "a", "path")
    second.adapter_error = (grpc.StatusCode.INVALID_ARGUMENT, "bad")
    code, detail = await refused(load(world, "a", "other", replace=True))
    assert detail == f"{second.address}: bad; {first.address}: replaced, which cannot be undone"


async def test_an_engine_that_starts_later_gets_the_adapters(make_world):
    world = await make_world(2, absent=1, **ALLOWED)
    await load(world, "a", "path")
    late = await world.start(1)
    await world.until(lambda: held(late) == {"a": "path"})
    await world.kill(0)
    answer = await world.stub.Generate(spec("a"), timeout=HANG_S)
    assert answer.model == "a"


async def test_engines_attached_before_get_an_adapter_that_a_later_one_brings(make_world):
    world = await make_world(2, absent=2)
    early = await world.start(0)
    await world.until_usable(1)
    await world.start(1, adapters={"a": "path"})
    await world.until(lambda: held(early) == {"a": "path"})
    await world.kill(1)
    assert (await world.stub.Generate(spec("a"), timeout=HANG_S)).model == "a"


async def test_an_adapter_of_a_later_engine_replaces_none_of_the_same_name(make_world):
    world = await make_world(2, absent=2)
    early = await world.start(0, adapters={"a": ""})  # of a flag, which has no path
    await world.until_usable(1)
    await world.start(1, adapters={"a": "two", "b": "b"})
    await world.until(lambda: "b" in held(early))
    assert held(early) == {"a": "", "b": "b"}


async def test_a_request_waits_for_the_adapter_of_a_restarted_engine(make_world):
    world = await make_world(1, **ALLOWED)
    await load(world, "a", "path")
    answering = world.stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec("a", "x" * 40).spec), timeout=HANG_S)
    world.engines[0].pause()
    await world.until(lambda: world.engines[0].num_open == 1)
    await world.kill(0)
    restarted = await world.start(0)
    finished = [message async for message in answering if message.HasField("finished")]
    assert len(finished) == 1
    assert held(restarted) == {"a": "path"}
    assert restarted.submissions[0].adapter_sha256 == digest_of("path")


async def test_an_engine_that_was_away_unloads_what_was_unloaded(make_world):
    world = await make_world(2, **ALLOWED)
    await load(world, "a", "path")
    await world.kill(1)
    await unload(world, "a")
    back = await world.start(1, adapters={"a": "path"})
    await world.until(lambda: held(back) == {})
    assert await adapters(world) == []


async def test_what_another_frontend_changes_is_followed(make_world):
    """An engine tells all frontends; what it unloads is not loaded again."""
    world = await make_world(2, absent=1)
    first = world.engines[0]
    first.set_adapters({"a": fake_adapter("a", "path")})
    await world.until(lambda: [one.name for one in world.app.engines._adapters] == ["a"])
    assert await adapters(world) == ["a"]
    second = await world.start(1)
    await world.until(lambda: held(second) == {"a": "path"})
    first.set_adapters({})
    await world.until(lambda: world.app.engines.adapter_control.preferred("a") is None)
    second.set_adapters({})
    await world.until(lambda: not world.app.engines._adapters)
    assert (held(first), held(second)) == ({}, {})


async def test_a_replaced_adapter_serves_new_requests_by_its_new_digest(make_world):
    world = await make_world(2, **ALLOWED)
    await load(world, "a", "one")
    code, detail = await refused(load(world, "a", "two"))
    assert (code, "has already been loaded" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await load(world, "a", "two", replace=True)
    await world.stub.Generate(spec("a"), timeout=HANG_S)
    (submission,) = [one for engine in world.engines.values() for one in engine.submissions]
    assert submission.adapter_sha256 == digest_of("two")


async def test_a_request_whose_adapter_was_just_unloaded_is_not_found(make_world):
    world = await make_world(1, **ALLOWED)
    await load(world, "a", "path")
    engine = world.engines[0]
    engine.rejections = [rejection(engine_pb.REJECTION_REASON_NO_ADAPTER, "it is gone")]
    code, detail = await refused(world.stub.Generate(spec("a"), timeout=HANG_S))
    assert (code, detail) == (grpc.StatusCode.NOT_FOUND, "the model's adapter has been unloaded")


async def test_an_engine_that_dies_while_it_loads_fails_the_call_with_unavailable(make_world):
    world = await make_world(1, **ALLOWED)
    engine = world.engines[0]
    begun, never = asyncio.Event(), asyncio.Event()

    async def hang(context):
        begun.set()
        await never.wait()

    engine._refuse_adapter = hang
    loading = asyncio.create_task(refused(load(world, "a", "path")))
    await asyncio.wait_for(begun.wait(), HANG_S)
    await world.kill(0)
    code, _ = await asyncio.wait_for(loading, HANG_S)
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_call_that_is_cancelled_loads_the_adapter_into_all_engines(make_world, is_stopped):
    world = await make_world(2, **ALLOWED)
    first, second = world.engines.values()
    begun, may_load, cancelled = (asyncio.Event() for _ in range(3))

    async def wait(context):
        begun.set()
        try:
            await may_load.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    second._refuse_adapter = wait
    call = world.stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="path"))
    await asyncio.wait_for(begun.wait(), HANG_S)
    call.cancel()
    await asyncio.wait_for(world.app.calls.wait_idle(), HANG_S)
    if is_stopped:
        await world.app.stop()
        await asyncio.wait_for(cancelled.wait(), HANG_S)
        return
    may_load.set()
    await world.until(lambda: held(second) or cancelled.is_set())
    assert (held(first), held(second)) == ({"a": "path"}, {"a": "path"})


async def test_engines_with_different_names_serve_one_model_under_all_of_them(make_world):
    world = await make_world(2, absent=2, **ALLOWED)
    await world.start(0, aliases=["one", "both"], adapters={"a": "a"})
    await world.start(1, aliases=["both", "two", "a"])
    await world.until_usable(2)
    model = await world.stub.GetModel(pb.GetModelRequest(), timeout=HANG_S)
    assert sorted(model.aliases) == ["a", "both", "one", "two"]
    assert list(model.adapters) == []  # the name is the model's
    for name in ("fake", *model.aliases):
        for _ in range(3):
            assert (await world.stub.Generate(spec(name), timeout=HANG_S)).model == "fake"
    submissions = [one for engine in world.engines.values() for one in engine.submissions]
    assert {one.adapter for one in submissions} == {""}
    await world.kill(1)
    assert await adapters(world) == ["a"]
    assert (await world.stub.Generate(spec("a"), timeout=HANG_S)).model == "a"
    assert (await refused(world.stub.Generate(spec("two"), timeout=HANG_S)))[0] is grpc.StatusCode.NOT_FOUND
