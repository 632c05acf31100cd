import asyncio
import hashlib
from contextlib import aclosing

import pytest

from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.engine import MockEngine, MockFailureError
from tests.support.loadgen.virtual_time import virtual_mock_time


async def take(engine: MockEngine, num_asked: int, stop_after: int | None = None) -> int:
    num_tokens = 0
    async with aclosing(engine.answer(b"prompt", 7, num_asked)) as messages:
        async for message in messages:
            num_tokens += message.num_tokens
            if stop_after is not None and num_tokens >= stop_after:
                break
    return num_tokens


async def test_an_answer_keeps_its_times_and_is_recorded() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.05, itl_s=0.01))
    assert await take(engine, 6) == 6
    (seen,) = engine.record.requests
    assert seen.prompt_sha256 == hashlib.sha256(b"prompt").hexdigest()
    assert (seen.num_input_tokens, seen.num_asked, seen.num_sent, seen.outcome) == (7, 6, 6, "done")
    assert seen.first_ns - seen.arrived_ns >= 0.049e9
    assert seen.ended_ns - seen.arrived_ns >= 0.099e9


async def test_a_client_that_leaves_is_recorded() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.0, itl_s=0.0))
    await take(engine, 10, stop_after=3)
    assert (engine.record.requests[0].outcome, engine.record.requests[0].num_sent) == ("cancelled", 3)
    assert engine.record.num_open == 0


async def test_failures_are_raised_and_recorded() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.0, itl_s=0.0, error_rate=1.0))
    with pytest.raises(MockFailureError):
        await take(engine, 10)
    assert engine.record.requests[0].outcome == "failed"


async def test_open_answers_are_counted() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.05, itl_s=0.0))
    await asyncio.gather(*(take(engine, 5) for _ in range(7)))
    assert (engine.record.max_open, engine.record.num_open) == (7, 0)


def test_the_stall_counts_from_the_first_request_that_is_no_probe() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.0, itl_s=0.02, stall_at_s=0.05, stall_s=0.4))

    async def probe_and_two_requests() -> None:
        await take(engine, 4)
        assert engine.record.stall is None
        await asyncio.gather(take(engine, 5), take(engine, 5))

    with virtual_mock_time() as (runner, _):
        runner.run(probe_and_two_requests())
    first, second = engine.record.answered()
    assert engine.record.stall == (first.arrived_ns + 50_000_000, first.arrived_ns + 450_000_000)
    for seen in (first, second):
        assert seen.ended_ns - seen.arrived_ns == 480_000_000  # 80 ms of answer, the last 30 after the stall


def test_probes_are_left_out_of_what_was_run() -> None:
    engine = MockEngine(MockBehaviour(ttft_s=0.0, itl_s=0.0))

    async def both() -> None:
        await take(engine, 4)
        await take(engine, 5)

    asyncio.run(both())
    assert [seen.num_asked for seen in engine.record.requests] == [4, 5]
    assert [seen.num_asked for seen in engine.record.answered()] == [5]


def test_a_share_of_the_prompt_is_said_to_be_cached() -> None:
    assert MockEngine(MockBehaviour(cached_share=0.3)).num_cached(10) == 3
