"""A frontend with several FakeEngines that are started and killed during a test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizers

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.frontend.accounts import check_account
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.tasks import no_tasks_left


class World:
    """One frontend, and engines by index, each with its own address."""

    def __init__(self, folder: Path, num_engines: int, make_engine: Callable[..., FakeEngine]) -> None:
        self.addresses = [f"unix:{folder}/{index}.sock" for index in range(num_engines)]
        self._make_engine = make_engine
        self.engines: dict[int, FakeEngine] = {}
        self.all_engines: list[FakeEngine] = []
        self.app: Any = None
        self._channel: Any = None

    async def start_frontend(self, **config: Any) -> None:
        config = {"engine": tuple(self.addresses), "http": False, **config}
        self.app = FrontendApp(FrontendConfig(port=0, http_port=0, **config))
        await self.app.start()
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.app.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: Any = GenerationServiceStub(self._channel)

    async def start(self, index: int, **options: Any) -> FakeEngine:
        engine = self._make_engine(address=self.addresses[index], **options)
        self.engines[index] = engine
        self.all_engines.append(engine)
        await engine.start()
        return engine

    async def kill(self, index: int) -> None:
        """Kills an engine and waits until the frontend has noticed."""
        engine = self.engines.pop(index)
        await engine.kill()
        await self.until(lambda: engine.instance_id not in self.attached())

    def attached(self) -> set[str]:
        attachments = (client.attachment for client in self.app.engines._connections.values())
        return {attachment.instance_id for attachment in attachments if attachment is not None}

    async def until(self, condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.001)  # lets the sockets' other ends run

    async def until_usable(self, num_engines: int) -> None:
        await self.until(lambda: len(self.app.engines._usable) == num_engines)

    async def held(self) -> int:
        """Waits until an engine has the only request; returns the engine's index."""
        await self.until(lambda: sum(engine.num_open for engine in self.engines.values()) == 1)
        ((index, _),) = [(index, engine) for index, engine in self.engines.items() if engine.num_open]
        return index

    async def stop(self) -> None:
        for engine in self.engines.values():
            engine.resume()
        if self.engines:
            await self.app.calls.wait_idle()
            for engine in self.engines.values():
                async with asyncio.timeout(HANG_S):
                    await engine.wait_for(lambda engine=engine: engine.num_open == 0)
            await self.until(lambda: not any(c.num_open for c in self.app.engines._connections.values()))
            for client in self.app.engines._connections.values():
                if client.attachment is not None:
                    client.attachment.session.check_integrity()
        assert self.app.engines.num_waiting == 0
        assert self.app.admission.num_requests == 0
        await self._channel.close()
        await self.app.stop()
        for engine in self.engines.values():
            await engine.kill()


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """make_world(num_engines, make_engine=FakeEngine, **config) starts a frontend and attaches its engines to it."""
    worlds: list[World] = []

    async def make(
        num_engines: int = 2, *, make_engine: Callable[..., FakeEngine] = FakeEngine, absent: int = 0, **config: Any
    ) -> World:
        world = World(tmp_path, num_engines, make_engine)
        worlds.append(world)
        for index in range(num_engines - absent):
            await world.start(index)
        await world.start_frontend(**config)
        await world.until_usable(num_engines - absent)
        return world

    async with no_tasks_left():
        yield make
        for world in worlds:
            await world.stop()


class Reading:
    """One stream, read in the background; checks that no token is missing and that it ends exactly once."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.token_ids: list[int] = []
        self.text = ""
        self.started: list[pb.Started] = []
        self.finished: list[pb.Finished] = []
        self.logprobs: list[float] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                assert not self.finished, "a message follows the end"
                if message.HasField("started"):
                    self.started.append(message.started)
                if message.HasField("chunk"):
                    assert message.chunk.first_token_index == len(self.token_ids), "tokens are missing"
                    self.token_ids += message.chunk.token_ids
                    self.text += message.chunk.text
                    self.logprobs += message.chunk.logprobs.chosen
                if message.HasField("finished"):
                    self.finished.append(message.finished)
        except grpc.aio.AioRpcError as error:
            self.error = error

    async def end(self, timeout_s: float = HANG_S) -> "Reading":
        async with asyncio.timeout(timeout_s):
            await self.task
        return self

    async def complete(self, expected: list[int]) -> pb.Finished:
        """Waits for the end; checks that the answer is complete, with these tokens and a consistent account."""
        await self.end()
        assert self.error is None, self.error
        assert self.token_ids == expected
        assert len(self.started) == len(self.finished) == 1
        assert self.finished[0].usage.num_output_tokens == len(expected)
        check_account(self.finished[0])
        return self.finished[0]


@pytest.fixture
def read(text_request: Any) -> Callable[..., Reading]:
    """read(world, text, ...) starts a request and reads its answer in the background."""

    def start(
        world: World, text: str, *, output: dict[str, Any] | None = None, timeout: Any = None, **stop: Any
    ) -> Any:
        stop = {"max_tokens": 3000, **stop}
        options = pb.OutputOptions(token_ids=True, **(output or {}))
        return Reading(world.stub.StreamGenerate(text_request(text, output=options, **stop), timeout=timeout))

    return start


@pytest.fixture
def read_request() -> Callable[..., Reading]:
    """read_request(world, request) reads the answer to any request in the background."""
    return lambda world, request: Reading(world.stub.StreamGenerate(request))


@pytest.fixture(scope="session")
def ids() -> Callable[[str], list[int]]:
    """ids(text) returns the answer of FakeEngine: the tokens of the prompt and an end token."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())
    return lambda text: [*tokenizer.encode(text).ids, END_TOKEN_ID]
