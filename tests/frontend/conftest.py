"""The pair for tests: a FakeEngine and a real frontend in front of it, joined by real channels on one event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.tasks import no_tasks_left


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """skip(seconds) lets time pass at once, for all that reads the clock here, the event loop too; gRPC has its own.

    To be asked for before what it is for, so that it outlives that. After more than --stall-timeout what is just being
    written counts as stalled.
    """
    monotonic, unix, skipped_s = time.monotonic, time.time, 0.0

    def pass_by(seconds: float) -> None:
        nonlocal skipped_s
        skipped_s += seconds

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + skipped_s)
    monkeypatch.setattr(time, "time", lambda: unix() + skipped_s)
    return pass_by


@dataclass
class Pair:
    engine: FakeEngine
    app: FrontendApp
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def channel(self, *options: tuple[str, Any]) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.app.port}", options=[("grpc.use_local_subchannel_pool", 1), *options]
        )
        self.channels.append(channel)
        return channel

    def stub(self, *options: tuple[str, Any]) -> Any:
        return GenerationServiceStub(self.channel(*options))

    @property
    def session(self) -> Any:
        return self.app.engines.attachment().session

    async def idle(self) -> None:
        """Waits until nothing is left of any request, on either side."""
        async with asyncio.timeout(HANG_S):
            while not self._is_idle():  # again if a call that its client has long left comes only now
                await self.app.calls.wait_idle()
                await self.engine.wait_for(lambda: self.engine.num_open == 0)
                await asyncio.sleep(0)
        assert self.app.admission.num_requests == 0
        assert self.app.admission.num_tokens == 0

    def _is_idle(self) -> bool:
        num_in_session = self.session.num_open if self.app.engines.serving else 0
        return not (self.app.calls.num_unsent or self.app.calls.num_active or self.engine.num_open or num_in_session)


MakePair = Callable[..., Awaitable[Pair]]


@asynccontextmanager
async def started_pairs() -> AsyncIterator[MakePair]:
    """Starts pairs; at the end nothing may be left of them."""
    pairs: list[Pair] = []

    async def make(*, engine: FakeEngine | None = None, wait: bool = True, **config: Any) -> Pair:
        engine = engine or FakeEngine()
        address = await engine.start()
        config = {"http": False, **config}
        pair = Pair(engine, FrontendApp(FrontendConfig(port=0, http_port=0, engine=(address,), **config)))
        pairs.append(pair)
        await pair.app.start()
        if wait:
            await pair.app.wait_serving(HANG_S)
        return pair

    async with no_tasks_left():
        yield make
        for pair in pairs:
            for channel in pair.channels:
                await channel.close()
            if pair.app.engines.serving:
                pair.engine.resume()
                await pair.idle()
                pair.session.check_integrity()
            await pair.app.stop()
            await pair.engine.kill()


@pytest.fixture
async def make_pair() -> AsyncIterator[MakePair]:
    """make_pair(...) -> a pair of this test alone; see `started_pairs`."""
    async with started_pairs() as make:
        yield make


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_pair() -> AsyncIterator[Callable[..., Awaitable[Pair]]]:
    """module_pair(template) -> a pair with HTTP, the same one for all tests of a module; they run on its event loop.

    Its engine has recorded nothing yet and makes one token per step.
    """
    known: dict[tuple[str, int], Pair] = {}
    async with started_pairs() as make:

        async def shared(template: str = "", *, max_model_len: int = 4096) -> Pair:
            key = template, max_model_len
            if key not in known:
                files = byte_tokenizer_files(template) if template else None
                known[key] = await make(engine=FakeEngine(files=files, max_model_len=max_model_len), http=True)
            engine = known[key].engine
            engine.submissions.clear()
            engine.cancels.clear()
            engine.tokens_per_step = 1
            return known[key]

        yield shared


def pytest_itemcollected(item: pytest.Item) -> None:
    """Runs tests that share a pair on their module's event loop."""
    if "module_pair" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest.fixture
async def pair(make_pair: MakePair) -> Pair:
    return await make_pair()


@pytest.fixture
def text_request() -> Callable[..., pb.StreamGenerateRequest]:
    """Makes requests for text prompts: stop options by keyword."""

    def make(text: str, *, sampling: Any = None, output: Any = None, **stop: Any) -> pb.StreamGenerateRequest:
        return pb.StreamGenerateRequest(
            spec=pb.GenerationSpec(text=text, sampling=sampling, output=output, stop=pb.StopOptions(**stop))
        )

    return make


@pytest.fixture
def scrape() -> Callable[..., Any]:
    """Samples of one name by the values of some labels: a bare value for one label, the one sample's value for none."""

    def read(metrics: Any, name: str, *labels: str) -> Any:
        samples = [
            sample
            for family in text_string_to_metric_families(metrics.render().decode())
            for sample in family.samples
            if sample.name == name
        ]
        if not labels:
            return sum(sample.value for sample in samples)
        values = {}
        for sample in samples:
            key = tuple(sample.labels[label] for label in labels)
            values[key[0] if len(key) == 1 else key] = sample.value
        return values

    return read


@pytest.fixture
async def http_pair(make_pair):
    return await make_pair(http=True, failover_timeout_s=0)


@pytest.fixture
def pair_of(make_pair):
    """pair_of(template) -> a pair whose model has this chat template."""

    async def make(template, **config):
        return await make_pair(engine=FakeEngine(files=byte_tokenizer_files(template)), http=True, **config)

    return make
