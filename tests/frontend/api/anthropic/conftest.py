"""Anthropic's own client."""

import ssl
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as for OpenAI's client


@pytest.fixture(scope="session")
def new_client() -> Callable[..., Any]:
    """new_client(pair) -> a client without retries."""

    def new(pair: Any, **options: Any) -> Any:
        http = anthropic.DefaultAsyncHttpxClient(verify=NO_TLS)
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, "http_client": http, **options}
        return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{pair.app.http_port}", **options)

    return new
