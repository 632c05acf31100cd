"""The folder of the repository, and a page of /metrics as a frontend with an engine serves it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(params=["chairlift", "vllm"])
def prefix(request: pytest.FixtureRequest) -> str:
    """Of --metrics-prefix."""
    return str(request.param)


@pytest.fixture
async def page(prefix: str) -> AsyncIterator[str]:
    """What /metrics says after one request, through a real frontend in front of an engine without a model."""
    engine = FakeEngine()
    engine.load = engine_pb.LoadStats(num_free_blocks=100)
    address = await engine.start()
    app = FrontendApp(FrontendConfig(port=0, http=False, engine=(address,), metrics_prefix=prefix))
    await app.start()
    await app.wait_serving(HANG_S)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        await GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="abc")))
    await app.calls.wait_idle()
    yield app.metrics.render().decode()
    await app.stop()
    await engine.kill()
