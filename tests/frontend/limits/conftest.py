"""A shared pair with both APIs, and a stream that must not be disturbed while limits are tested."""

import asyncio

import grpc
import pytest_asyncio

from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S

END_TOKEN_ID = 256


@pytest_asyncio.fixture(loop_scope="module")
async def pair(module_pair):
    """Its model takes 4096 tokens of prompt and answer and has 258 of them; a character is a token."""
    pair = await module_pair()
    pair.engine.tokens_per_step = 256
    ids = [i * i % 256 for i in range(2000)]
    spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), output=pb.OutputOptions(text=False, token_ids=True))
    spec.stop.max_tokens = len(ids) + 1
    call = pair.stub().StreamGenerate(pb.StreamGenerateRequest(spec=spec))
    async with asyncio.timeout(HANG_S):
        await call.read()
    yield pair
    got = []
    async with asyncio.timeout(HANG_S):
        while (message := await call.read()) is not grpc.aio.EOF:
            got += message.chunk.token_ids
    assert got == [*ids, END_TOKEN_ID], "the neighbour was disturbed"
