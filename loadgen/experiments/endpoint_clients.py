"""Clients of the frontend's two doors that do as little as one can: one connection per stream, tokens and times out.

The HTTP one reads server-sent events off a bare connection: the client computes on the same cores as the server, and
what a whole HTTP library costs would be measured with it.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import grpc
import grpc.aio

from chairlift.bench.benchmark import BenchmarkError
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_TIMEOUT_S = 600.0
_EVENT = b"data: "
_DONE = b"data: [DONE]"


class Answer(NamedTuple):
    """What one stream brought.

    Attributes:
        num_tokens: every token is one character of text.
        first_token_s: from the request to the first of them.
    """

    num_tokens: int
    num_messages: int
    first_token_s: float


Ask = Callable[[int, int], Awaitable[Answer]]
"""Asks a port for so many tokens, over a connection of its own."""


async def ask_grpc(port: int, num_tokens: int) -> Answer:
    """Over gRPC.

    Raises: BenchmarkError: the call failed.
    """
    request = pb.StreamGenerateRequest(
        spec=pb.GenerationSpec(
            text="prompt",
            sampling=pb.SamplingOptions(temperature=0.0),
            stop=pb.StopOptions(max_tokens=num_tokens, ignore_end_token=True),
        )
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        started_s = time.monotonic()
        first_s, texts = 0.0, []
        try:
            async for response in GenerationServiceStub(channel).StreamGenerate(request, timeout=_TIMEOUT_S):
                if response.chunk.text:
                    first_s = first_s or time.monotonic()
                    texts.append(response.chunk.text)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"a call failed: {error.code().name}: {error.details()}") from error
    return Answer(sum(map(len, texts)), len(texts), first_s - started_s)


async def ask_http(port: int, num_tokens: int) -> Answer:
    """Over HTTP, as server-sent events.

    Raises: BenchmarkError: the answer is none.
    """
    body = json.dumps(
        {"prompt": "prompt", "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started_s = time.monotonic()
    writer.write(head.encode() + body)
    first_s, texts, first_line = 0.0, [], b""
    async for line in reader:
        first_line = first_line or line
        if not line.startswith(_EVENT) or line.startswith(_DONE):
            continue
        if text := json.loads(line[len(_EVENT) :])["choices"][0]["text"]:
            first_s = first_s or time.monotonic()
            texts.append(text)
    writer.close()
    if not texts:
        raise BenchmarkError(f"a call failed: {first_line.decode().strip()}")
    return Answer(sum(map(len, texts)), len(texts), first_s - started_s)


ASK: Mapping[str, Ask] = {"gRPC": ask_grpc, "HTTP": ask_http}
"""By the name of the door."""
