"""The pair with its HTTP endpoint, and Anthropic's own client in front of it."""

from collections.abc import AsyncIterator, Callable

import anthropic
import pytest


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., anthropic.AsyncAnthropic]]:
    """connect(pair) -> a client without retries; closed at the end."""
    clients = []

    def make(pair, **options) -> anthropic.AsyncAnthropic:
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        clients.append(anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{pair.app.http_port}", **options))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
async def client(http_pair, connect) -> anthropic.AsyncAnthropic:
    return connect(http_pair)
