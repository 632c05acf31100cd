"""Several frontends on one engine: none of them can keep the others out, or waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from engine.core.outputs import SchedulerOutput
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel

ENDLESS = FakeModel(end_probability=0.0)


class Hold:
    """Blocks the step loop in a step until it is released."""

    def __init__(self) -> None:
        self.has_step = threading.Event()
        self._is_free = threading.Event()

    def __call__(self, plan: SchedulerOutput) -> None:
        self.has_step.set()
        assert self._is_free.wait(HANG_S)

    def let_go(self) -> None:
        self._is_free.set()


Frontends = tuple[AttachClient, AttachClient, Hold]


@pytest.fixture
async def frontends() -> AsyncIterator[Frontends]:
    """One that floods the engine, one that does not, and the step in which the flood's first request is held."""
    hold = Hold()
    parts = fake_engine_parts(model=ENDLESS, max_waiting=30, max_num_seqs=1, on_step=hold)
    async with run_engine(parts) as server:
        try:
            async with AttachClient.open(server.address) as flood, AttachClient.open(server.address) as modest:
                await flood.submit(submission(1, [1], 2))
                await asyncio.to_thread(hold.has_step.wait)
                yield flood, modest, hold
        finally:
            hold.let_go()


async def test_who_asks_for_little_does_not_wait_behind_a_flood(frontends: Frontends) -> None:
    flood, modest, hold = frontends
    await flood.submit(*(submission(handle, [1], 2) for handle in range(2, 21)))
    await flood.until_read()
    await modest.submit(submission(1, [1], 2))
    await modest.until_read()
    hold.let_go()
    await modest.ended(1)
    await flood.ended(*range(1, 21))
    waits_us = [flood.received[handle].completion.queued_us for handle in range(2, 21)]  # they came together
    assert waits_us == sorted(waits_us)
    assert modest.received[1].completion.queued_us < waits_us[2]


async def test_share_of_the_engines_room_is_left_to_everyone(frontends: Frontends) -> None:
    flood, modest, hold = frontends
    await flood.submit(*(submission(handle, [1], 2) for handle in range(2, 33)))  # 31 is all that the engine holds
    await flood.until(lambda: flood.received[32].has_ended)
    assert "the engine has 31 open requests, at most 31; this frontend has 31, its share is 31" in (
        flood.rejections[0].detail
    )
    await modest.submit(*(submission(handle, [1], 2) for handle in range(1, 18)))
    await modest.until(lambda: modest.received[17].has_ended)
    assert "47 open requests, at most 31; this frontend has 16" in modest.rejections[0].detail
    hold.let_go()
    answers = await modest.ended(*range(1, 16))
    assert [answer.rejection for answer in answers[:15]] == [None] * 15
    assert all(len(answer.token_ids) == 2 for answer in answers[:15])
