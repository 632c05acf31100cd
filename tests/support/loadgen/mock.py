"""A mock server in a thread of the test, so that its record is at hand."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.engine import MockServer
from loadgen.mock.running import MockApi, mock_server

_START_TIMEOUT_S = 60.0


@contextlib.contextmanager
def mock_in_thread(api: MockApi, behaviour: MockBehaviour) -> Iterator[MockServer]:
    """A server with an event loop of its own in a thread. Nothing else in this process may use grpc.aio meanwhile."""
    server = mock_server(api, behaviour)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mock-server", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(_START_TIMEOUT_S)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(_close(server), loop).result(_START_TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(server: MockServer) -> None:
    await server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
