"""A frontend in front of engines of other projects, which are started and killed during a test."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
import tokenizers

from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.foreign_engine import ForeignEngine
from tests.support.frontend.tasks import no_tasks_left

KINDS = ("vllm", "sglang", "trtllm")


class ForeignWorld:
    """One frontend, and engines in the order of their addresses."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines
        self.addresses: list[str] = []
        self.app: Any = None
        self._channel: Any = None

    async def start(self, *, usable: int | None = None, **config: Any) -> None:
        self.addresses = [await engine.start() for engine in self.engines]
        config = {"engine": tuple(self.addresses), "http": False, **config}
        self.app = FrontendApp(FrontendConfig(port=0, http_port=0, **config))
        await self.app.start()
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.app.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.stub: Any = GenerationServiceStub(self._channel)
        await self.until_usable(len(self.engines) if usable is None else usable)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                await asyncio.sleep(0.001)  # lets the sockets' other ends run

    async def until_usable(self, num_engines: int) -> None:
        await self.until(lambda: len(self.app.engines._usable) == num_engines)

    async def holder(self) -> Any:
        """Waits until an engine has the only request; returns the engine."""
        await self.until(lambda: sum(engine.num_open for engine in self.engines) == 1)
        return next(engine for engine in self.engines if engine.num_open)

    def other(self, engine: Any) -> Any:
        return next(one for one in self.engines if one is not engine)

    async def stop(self) -> None:
        for engine in self.engines:
            engine.resume()
        if self.app is not None:
            async with asyncio.timeout(HANG_S):
                await self.app.calls.wait_idle()
            await self.until(lambda: not any(engine.num_open for engine in self.engines))
            await self.until(lambda: not any(one.num_open for one in self.app.engines._connections.values()))
            for connection in self.app.engines._connections.values():
                if connection.attachment is not None:
                    connection.attachment.session.check_integrity()
            assert self.app.engines.num_waiting == 0
            assert self.app.admission.num_requests == 0
            await self._channel.close()
            await self.app.stop()
        for engine in self.engines:
            await engine.kill()


MakeForeign = Callable[..., Awaitable[ForeignWorld]]


@pytest.fixture
async def make_foreign() -> AsyncIterator[MakeForeign]:
    """make_foreign(*engines, **config) starts engines, and a frontend attached to them; a kind stands for an engine."""
    worlds: list[ForeignWorld] = []

    async def make(*engines: Any, **config: Any) -> ForeignWorld:
        made = [ForeignEngine(kind=one) if isinstance(one, str) else one for one in engines]
        world = ForeignWorld(made)
        worlds.append(world)
        await world.start(**config)
        return world

    async with no_tasks_left():
        yield make
        for world in worlds:
            await world.stop()


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    """encode(text) returns the tokens of a prompt."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())
    return lambda text: list(tokenizer.encode(text).ids)
