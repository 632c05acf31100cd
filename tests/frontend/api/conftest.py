"""The pair with HTTP, and OpenAI's own client in front of it."""

import asyncio
import concurrent.futures
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the clients' own reads certificates, which takes 20 ms


@pytest.fixture(scope="session")
def sdk() -> tuple[Callable[..., Any], Callable[..., Any], str]:
    """The client, its HTTP client, and the path of its base URL."""
    return openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient, "/v1"


@pytest.fixture(scope="module")  # a session's would keep the first folder's `sdk`
def new_client(sdk: tuple[Callable[..., Any], Callable[..., Any], str]) -> Callable[..., Any]:
    """new_client(pair) -> a client without retries."""
    client_type, http_client_type, path = sdk

    def new(pair: Any, **options: Any) -> Any:
        http = http_client_type(verify=NO_TLS)
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, "http_client": http, **options}
        return client_type(base_url=f"http://127.0.0.1:{pair.app.http_port}{path}", **options)

    return new


@pytest.fixture
async def connect(new_client) -> AsyncIterator[Callable[..., Any]]:
    """The same; closes the clients at the end."""
    clients = []

    def make(pair, **options) -> Any:
        clients.append(new_client(pair, **options))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def client(http_pair, connect) -> Any:
    return connect(http_pair)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pairs(module_pair: Any, new_client: Any) -> AsyncIterator[Callable[..., Any]]:
    """shared_pairs(template) -> `module_pair(template)` and its client."""
    clients: dict[int, Any] = {}

    async def shared(*args: Any, **options: Any) -> Any:
        pair = await module_pair(*args, **options)
        if pair.app.http_port not in clients:
            clients[pair.app.http_port] = new_client(pair)
        return pair, clients[pair.app.http_port]

    yield shared
    for client in clients.values():
        await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def shared_pair(shared_pairs: Any) -> Any:
    """The shared pair without options."""
    return (await shared_pairs())[0]


@pytest_asyncio.fixture(loop_scope="module")
async def shared_client(shared_pairs: Any) -> Any:
    """Its client."""
    return (await shared_pairs())[1]


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
        await app.wait_serving(HANG_S)
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
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=HANG_S) as client:
        yield client
    for loop, stop in stops:
        loop.call_soon_threadsafe(stop.set)
    thread.join()
