"""Mock servers on the test's own event loop, and targets that talk to them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import MockServer, mock_server
from loadgen.target.base import Api, Target, TargetSpec
from loadgen.target.open import open_target
from tests.hang import HANG_S

Opened = tuple[Target, MockServer]
Open = Callable[..., Awaitable[Opened]]


@pytest.fixture
async def open_mock() -> AsyncIterator[Open]:
    """open_mock(api, behaviour, **spec): a server and a target; text prompts for chat."""
    async with AsyncExitStack() as stack:

        async def opened(api: Api, behaviour: MockBehaviour | None = None, **settings: Any) -> Opened:
            quick = behaviour or MockBehaviour(ttft_s=0.0, itl_s=0.0)
            server = mock_server("grpc" if api == "grpc" else "openai", quick)
            await server.start()
            stack.push_async_callback(server.close)
            spec = TargetSpec(server.url, api, prompt_mode="text" if api == "chat" else "ids")
            target = open_target(replace(spec, **settings), probe_timeout_s=HANG_S)
            stack.push_async_callback(target.close)
            return target, server

        yield opened
