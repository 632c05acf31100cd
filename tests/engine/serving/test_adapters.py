"""Adapters that are loaded and unloaded over real gRPC, while a fake model runs requests."""

import asyncio
import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from engine.core.adapter_slots import AdapterSlots
from engine.errors import AdapterNotFound, CheckpointError, EngineDraining
from engine.interfaces import Inbox
from engine.serving.adapters import EngineAdapters
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.gate import Gate

NUM_SLOTS = 2


def digest_of(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest()


class Loader:
    """Loads any path whose name says so, and records what was written to which place.

    Attributes:
        writes: place and path.
        may_go_on: cleared, it holds the path `slow`.
    """

    def __init__(self) -> None:
        self.writes: list[tuple[int, str]] = []
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, index: int, name: str, path: str, sha256: bytes) -> bytes:
        if path == "slow":
            self.is_held.set()
            assert self.may_go_on.wait(HANG_S)
        if path == "bad":
            raise CheckpointError(f"{path}: tensor x holds NaN or infinity")
        if path == "missing":
            raise AdapterNotFound(f"lora_path {path!r}: no such folder in those of --lora-dir")
        self.writes.append((index, path))
        return digest_of(path)


class Served:
    """An engine with places for adapters, and a stub to change them."""

    def __init__(self, address: str, stub: EngineServiceStub, loader: Loader) -> None:
        self.address = address
        self.stub = stub
        self.loader = loader

    async def load(self, name: str, path: str, **options: object) -> pb.LoadAdapterResponse:
        request = pb.LoadAdapterRequest(name=name, path=path, **options)  # type: ignore[arg-type]
        return await self.stub.LoadAdapter(request, timeout=HANG_S)

    async def unload(self, name: str, **options: object) -> pb.UnloadAdapterResponse:
        return await self.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name, **options), timeout=HANG_S)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serve(**options: object) -> AsyncIterator[Served]:
    parts, loader = fake_engine_parts(**options), Loader()  # type: ignore[arg-type]
    parts.info.adapters.append(pb.Adapter(name="first", sha256=b"f"))
    parts.info.aliases.append("alias")
    parts = dataclasses.replace(parts, num_adapter_slots=NUM_SLOTS, load_adapter=loader)
    async with run_engine(parts) as server, grpc.aio.insecure_channel(server.address) as channel:
        yield Served(server.address, EngineServiceStub(channel), loader)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as served:
        yield served


async def refused(call: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code(), caught.value.details() or ""


def names(adapters: pb.AdapterList) -> list[str]:
    return [adapter.name for adapter in adapters.adapters]


async def test_requests_use_an_adapter_from_its_load_to_its_unload(served: Served) -> None:
    async with AttachClient.open(served.address) as client:
        assert [adapter.name for adapter in client.welcome.info.adapters] == ["first"]
        loaded = await served.load("tuned", "path")
        assert (loaded.is_new, loaded.has_replaced, loaded.sha256) == (True, False, digest_of("path"))
        assert names(loaded.adapters) == ["first", "tuned"]
        assert loaded.adapters.adapters[1].path == "path"
        digest = digest_of("path")
        await client.submit(
            submission(1, [1], 2, adapter="tuned"), submission(2, [1], 2, adapter="tuned", adapter_sha256=digest)
        )
        assert all(one.completion is not None for one in await client.ended(1, 2))
        assert names((await served.unload("tuned")).adapters) == ["first"]
        await client.submit(
            submission(1, [1], 2, adapter="tuned"), submission(2, [1], 2, adapter="tuned", adapter_sha256=digest)
        )
        rejections = [one.rejection for one in await client.ended(1, 2)]
        reasons = [rejection.reason for rejection in rejections if rejection is not None]
        assert reasons == [pb.REJECTION_REASON_INVALID, pb.REJECTION_REASON_NO_ADAPTER]
    async with AttachClient.open(served.address) as client:
        assert [adapter.name for adapter in client.welcome.info.adapters] == ["first"]


async def test_every_frontend_is_told_of_changes(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        call = EngineServiceStub(channel).Attach()
        await call.write(pb.AttachRequest(command_seq=1, hello=pb.Hello(protocol_major=1)))
        welcome = (await call.read()).welcome
        assert names(welcome.status.adapters) == ["first"]
        loaded = await served.load("tuned", "path")
        revisions = [welcome.status.adapters.revision]
        while revisions[-1] < loaded.adapters.revision:
            message = await asyncio.wait_for(call.read(), HANG_S)
            revisions.append(message.status.adapters.revision)
        assert message.status.adapters == loaded.adapters
        call.cancel()


async def test_what_cannot_be_loaded_is_refused_and_leaves_its_place(served: Served) -> None:
    for _ in range(NUM_SLOTS):
        assert await refused(served.load("a", "bad")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad: tensor x holds NaN or infinity",
        )
    assert (await refused(served.load("a", "missing")))[0] is grpc.StatusCode.NOT_FOUND
    for name in ("", " a", "a\n", "x" * 257, "fake", "alias"):
        status, detail = await refused(served.load(name, "path"))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert "it must have 1 to 256 printable characters" in detail
    for path in ("", "x" * 4097):
        assert f"lora_path has {len(path)} characters" in (await refused(served.load("a", path)))[1]
    await served.load("a", "path")
    status, detail = await refused(served.load("b", "path"))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail.startswith("--max-loras is 2: 2 adapters are loaded, 0 are being loaded, and 0 were unloaded")
    assert (await refused(served.load("a", "other")))[1].startswith("lora_name 'a' has already been loaded")
    assert (await refused(served.unload("b")))[0] is grpc.StatusCode.NOT_FOUND
    assert (await refused(served.unload("a", sha256=b"other")))[0] is grpc.StatusCode.NOT_FOUND


async def test_loading_the_same_again_changes_nothing(served: Served) -> None:
    first = await served.load("a", "path")
    again = await served.load("a", "path", sha256=first.sha256)
    assert (again.is_new, again.adapters) == (False, first.adapters)
    await served.unload("first")
    same = await served.load("a", "path", replace=True)
    assert (same.is_new, same.has_replaced) == (False, False)


async def test_a_request_keeps_a_replaced_adapter_whose_place_is_written_only_after_it() -> None:
    gate = Gate()
    model = FakeModel(end_probability=0.0)
    async with serve(model=model, on_step=gate) as served, AttachClient.open(served.address) as client:
        old = await served.load("a", "one")
        await client.submit(submission(1, [1], 2, adapter="a", adapter_sha256=old.sha256))
        await gate.holds()
        await served.unload("first")
        place = served.loader.writes[-1][0]
        # The place of `first` is not free before a fence has passed, which the held step blocks.
        replacing = asyncio.create_task(served.load("a", "two", replace=True))
        for _ in range(2):
            await served.stub.GetEngineStatus(pb.GetEngineStatusRequest(), timeout=HANG_S)
        assert served.loader.writes[-1][0] == place
        gate.open()
        (ended,) = await client.ended(1)
        assert ended.completion is not None
        assert (await replacing).has_replaced
        assert served.loader.writes[-1][0] != place


async def test_a_slow_adapter_delays_no_request_and_no_other_adapter(served: Served) -> None:
    await served.unload("first")
    served.loader.may_go_on.clear()
    slow = asyncio.create_task(served.load("slow", "slow"))
    assert await asyncio.to_thread(served.loader.is_held.wait, HANG_S)
    async with AttachClient.open(served.address) as client:
        (answer,) = await client.generate(submission(1, [1], 4))
        assert answer.completion is not None
        loaded = await served.load("quick", "path")  # in the place of `first`, which is free when a fence has passed
        assert names(loaded.adapters) == ["quick"]
    served.loader.may_go_on.set()
    assert names((await slow).adapters) == ["quick", "slow"]


async def test_a_load_goes_on_when_its_caller_has_gone(served: Served) -> None:
    served.loader.may_go_on.clear()
    call = served.stub.LoadAdapter(pb.LoadAdapterRequest(name="slow", path="slow"))
    waiting = asyncio.ensure_future(call)
    assert await asyncio.to_thread(served.loader.is_held.wait, HANG_S)
    waiting.cancel()
    for _ in range(2):  # answered after the engine has seen the end of the call
        await served.stub.GetEngineStatus(pb.GetEngineStatusRequest(), timeout=HANG_S)
    served.loader.may_go_on.set()
    removed = await served.unload("slow")  # in turn, after the load
    assert names(removed.adapters) == ["first"]


async def test_a_load_that_waits_for_a_place_ends_with_the_engine() -> None:
    """The step loop has ended: no fence passes any more."""
    slots = AdapterSlots(1, [("first", b"f")])
    adapters = EngineAdapters(["model"], slots, Inbox(), Loader(), lambda: None)
    await adapters.unload(pb.UnloadAdapterRequest(name="first"))
    load = asyncio.create_task(adapters.load(pb.LoadAdapterRequest(name="a", path="path")))
    for _ in range(3):
        await asyncio.sleep(0)
    adapters.close()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(EngineDraining, match="the engine is draining and loads no adapters"):
            await load


async def test_a_fence_frees_only_the_place_whose_use_ended_before_it() -> None:
    """The first place is freed by the first fence, written again and unused again before the second fence passes."""
    slots = AdapterSlots(2, [("first", b"f"), ("second", b"s")])
    adapters = EngineAdapters(["model"], slots, Inbox(), Loader(), lambda: None)
    await adapters.unload(pb.UnloadAdapterRequest(name="first"))
    await adapters.unload(pb.UnloadAdapterRequest(name="second"))
    adapters.pass_fence(1)
    await adapters.load(pb.LoadAdapterRequest(name="a", path="path"))
    await adapters.unload(pb.UnloadAdapterRequest(name="a"))
    adapters.pass_fence(2)
    assert slots.freeing == {0}
    adapters.pass_fence(3)
    assert not slots.freeing
    adapters.close()


async def test_an_engine_without_folders_changes_nothing() -> None:
    async with run_engine(fake_engine_parts()) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub = EngineServiceStub(channel)
        status, detail = await refused(stub.LoadAdapter(pb.LoadAdapterRequest(name="a", path="b"), timeout=HANG_S))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert detail == "this engine does not load adapters at run time: start it with --enable-lora and --lora-dir"
        async with AttachClient.open(server.address) as client:
            assert not client.welcome.status.HasField("adapters")
