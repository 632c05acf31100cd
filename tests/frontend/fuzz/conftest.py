"""Fixtures of the fuzz tests of both APIs: seeded random cases beside valid streams, with checks for leftovers.

CHAIRLIFT_FUZZ_CASES is the number of cases of all tests. Each run has a new seed, which is printed; a failing case
prints the value of CHAIRLIFT_FUZZ_CASE that runs it alone.
"""

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine

NUM_CASES = int(os.environ.get("CHAIRLIFT_FUZZ_CASES", "10000"))
CASE_TIMEOUT_S = 100.0
NUM_AT_ONCE = 12
END_TOKEN_ID = 256


@pytest.fixture
async def pair(make_pair):
    return await make_pair(http=True, engine=FakeEngine(tokens_per_step=64), stall_timeout_s=2 * CASE_TIMEOUT_S)


@pytest.fixture
def run_cases(pair, caplog) -> Callable[..., Awaitable[int]]:
    """run_cases(run, share) awaits run(rng) for a share of the cases, beside valid streams; returns their number."""
    caplog.set_level(logging.WARNING)

    async def run(case: Callable[[random.Random], Awaitable[None]], share: float) -> int:
        one = os.environ.get("CHAIRLIFT_FUZZ_CASE")
        seed = secrets.token_hex(4)
        names = [one] if one else [f"{seed}-{index}" for index in range(int(NUM_CASES * share))]
        print(f"fuzzing: {len(names)} cases, the first is CHAIRLIFT_FUZZ_CASE={names[0]}")  # noqa: T201
        waiting = iter(names)
        done = asyncio.Event()

        async def worker() -> None:
            for name in waiting:
                try:
                    async with asyncio.timeout(CASE_TIMEOUT_S):
                        await case(random.Random(name))
                except Exception as error:
                    error.add_note(f"to see this case alone: CHAIRLIFT_FUZZ_CASE={name}")
                    raise
                loud = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
                assert not loud, f"in the log, about when CHAIRLIFT_FUZZ_CASE={name} ran: {caplog.text}"

        num_good = 0

        async def good(stub: object) -> None:
            nonlocal num_good
            while not done.is_set():
                async with asyncio.timeout(CASE_TIMEOUT_S):
                    await undisturbed(stub, num_good)
                num_good += 1

        async with asyncio.TaskGroup() as group:
            stub = pair.stub()
            for _ in range(2):
                group.create_task(good(stub))
            async with asyncio.TaskGroup() as workers:
                for _ in range(NUM_AT_ONCE):
                    workers.create_task(worker())
            done.set()
        async with asyncio.timeout(CASE_TIMEOUT_S):
            await pair.idle()  # admission, calls and the engine's requests are back at zero
        assert num_good >= 2
        return len(names)

    return run


async def undisturbed(stub: object, number: int) -> None:
    """One good stream, whose every token is known."""
    ids = [(number * 7 + i * i) % 256 for i in range(200)]
    spec = pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), output=pb.OutputOptions(text=False, token_ids=True))
    got: list[int] = []
    async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
        if message.HasField("chunk"):
            assert message.chunk.first_token_index == len(got)
            got += message.chunk.token_ids
    assert got == [*ids, END_TOKEN_ID]
    assert message.finished.reason == pb.FINISH_REASON_END_TOKEN
