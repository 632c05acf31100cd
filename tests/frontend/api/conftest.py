"""The pair with HTTP, and OpenAI's own client in front of it."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.support.frontend.fake_engine import FakeEngine


@pytest.fixture
def sdk() -> tuple[Callable[..., Any], str]:
    """The client class, and the path of its base URL."""
    return openai.AsyncOpenAI, "/v1"


@pytest.fixture
async def connect(sdk) -> AsyncIterator[Callable[..., Any]]:
    """connect(pair) -> a client without retries; closed at the end."""
    client_type, path = sdk
    clients = []

    def make(pair, **options) -> Any:
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        clients.append(client_type(base_url=f"http://127.0.0.1:{pair.app.http_port}{path}", **options))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def client(http_pair, connect) -> Any:
    return connect(http_pair)


@pytest.fixture
def blocking_client() -> Iterator[openai.OpenAI]:
    """OpenAI's blocking client; the pair runs on the event loop of another thread."""
    port: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def serve() -> None:
        engine = FakeEngine()
        app = FrontendApp(
            FrontendConfig(port=0, http_port=0, engine=(await engine.start(),), tool_call_parser="hermes")
        )
        await app.start()
        await app.wait_serving(10)
        stop = asyncio.Event()
        stops.append((asyncio.get_running_loop(), stop))
        port.set_result(app.http_port)
        await stop.wait()
        await app.stop()
        await engine.kill()

    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    base_url = f"http://127.0.0.1:{port.result(20)}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        yield client
    for loop, stop in stops:
        loop.call_soon_threadsafe(stop.set)
    thread.join()
