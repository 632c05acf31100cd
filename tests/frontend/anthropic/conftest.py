"""The pair with its HTTP endpoint, and Anthropic's own client in front of it."""

import json
from collections.abc import AsyncIterator, Callable

import anthropic
import pytest

from frontend.testing.byte_tokenizer import byte_tokenizer_files
from frontend.testing.fake_engine import FakeEngine


@pytest.fixture
async def http_pair(make_pair):
    return await make_pair(http=True, failover_timeout_s=0)


@pytest.fixture
def pair_of(make_pair):
    """pair_of(template) -> a pair whose model has this chat template."""

    async def make(template, **config):
        tokenizer_config = json.dumps({"eos_token": "<|end|>", "chat_template": template}).encode()
        files = {**byte_tokenizer_files(), "tokenizer_config.json": tokenizer_config}
        return await make_pair(engine=FakeEngine(files=files), http=True, **config)

    return make


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
