"""A fake model behind both APIs of one engine."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from engine.demo import MODEL_DIR
from engine.model.tokenizer_files import TokenizerFiles
from tests.support.engine.fake_engine import RunningEngine, fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.gateway import Gateway


@dataclass(frozen=True)
class Served:
    """An engine, and a client of its vLLM API."""

    server: RunningEngine
    gateway: Gateway
    model: FakeModel


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """start(**arguments of fake_engine_parts) -> Served, whose model never ends an answer by itself."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_engine(**arguments: Any) -> Served:
            model = FakeModel(vocab_size=3072, end_token_ids=frozenset({1}), end_probability=0.0)
            model = arguments.pop("model", model)
            parts = fake_engine_parts(
                model=model, tokenizer=TokenizerFiles.from_dir(MODEL_DIR), records_cache_events=True, **arguments
            )
            server = await stack.enter_async_context(run_engine(parts, serves_vllm=True))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            return Served(server, Gateway(channel), model)

        yield start_engine


@pytest.fixture
async def served(start: Callable[..., Any]) -> Served:
    """An engine with the default limits."""
    result: Served = await start()
    return result
