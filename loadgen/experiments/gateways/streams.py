"""Streams of answers over HTTP, and the load that they make together."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from loadgen.errors import TargetError

_TIMEOUT_S = 120.0


class Stream(NamedTuple):
    """One answer: seconds from the request to its first tokens, and number of tokens."""

    ttft_s: float
    num_tokens: int


StreamOne = Callable[[str, int], Awaitable[Stream]]
"""stream(prompt, max_tokens)"""


class HttpClient:
    """A client of OpenAI's API.

    Args:
        port: of the server, on 127.0.0.1.
        model: name of the model.
    """

    def __init__(self, port: int, model: str) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._model = model

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await self._session.close()

    async def stream(self, prompt: str, max_tokens: int) -> Stream:
        """Streams one answer.

        Raises: TargetError: the server refuses it, or does not say how many tokens it sent.
        """
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        began_s, ttft_s, usage = time.perf_counter(), 0.0, b""
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                raise TargetError(f"{self._url}: status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    usage = line
        counts = json.loads(usage.removeprefix(b"data: ") or b"{}").get("usage")
        if not counts:
            raise TargetError(f"{self._url}: the answer ends without its number of tokens: {usage[:200]!r}")
        return Stream(ttft_s, int(counts["completion_tokens"]))


class Load(NamedTuple):
    """What a run asks for.

    Attributes:
        num_streams: streams at once, which begin evenly over `spread_s`.
        num_turns: how often this is repeated, one after the other.
        max_tokens: tokens of each.
    """

    num_streams: int
    num_turns: int
    max_tokens: int
    spread_s: float

    @property
    def num_requests(self) -> int:
        """Requests of a run."""
        return self.num_streams * self.num_turns


async def run_load(load: Load, stream: StreamOne, prompt_len: int, seed: int) -> list[float]:
    """Runs a load; returns the seconds to the first token of each request.

    Args:
        load: what to ask for.
        stream: asks for one answer.
        prompt_len: characters of a prompt, which are random: no two share a prefix of a block.
        seed: of the prompts.
    Raises: TargetError: an answer has not all tokens.
    """
    rng = random.Random(seed)

    async def one(index: int) -> float:
        prompt = "".join(chr(rng.randrange(ord("a"), ord("z") + 1)) for _ in range(prompt_len))
        await asyncio.sleep(load.spread_s * index / load.num_streams)
        answer = await stream(prompt, load.max_tokens)
        if answer.num_tokens != load.max_tokens:
            raise TargetError(f"an answer has {answer.num_tokens} tokens instead of {load.max_tokens}")
        return answer.ttft_s

    times: list[float] = []
    for _ in range(load.num_turns):
        times += await asyncio.gather(*map(one, range(load.num_streams)))
    return times
