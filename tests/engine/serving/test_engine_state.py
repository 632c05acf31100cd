"""What frontends learn of the state of an engine over real gRPC: heartbeats, failures, drain, stalls."""

import itertools
import threading
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.outputs import SchedulerOutput
from engine.errors import StepError
from engine.serving.coalescing import CoalescePolicy
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.gate import Gate

ENDLESS = FakeModel(end_probability=0.0)


async def test_heartbeats_count_turns_while_idle_and_stop_counting_when_the_loop_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.serving.server.HEARTBEAT_S", 0.02)
    gate = Gate()
    gate.open()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_engine(fake_engine_parts(model=ENDLESS, on_step=gate)))
        stack.callback(gate.open)
        async with AttachClient.open(server.address) as client:
            await client.until(lambda: len({status.loop_turns for status in client.statuses}) >= 3)
            turns = [status.loop_turns for status in client.statuses]
            assert turns == sorted(turns)
            assert {status.engine_step for status in client.statuses} == {0}
            await client.generate(submission(1, [1], 9))
            gate.close()
            await client.submit(submission(1, [1], 9))
            await gate.holds()
            held_turns = server.engine.num_turns
            await client.until(lambda: [status.loop_turns for status in client.statuses].count(held_turns) >= 3)
            assert client.statuses[-1].loop_turns == server.engine.num_turns == held_turns
            gate.open()
            await client.ended(1)
            assert client.steps[-1].engine_step > 9


async def test_a_failed_row_ends_only_its_request() -> None:
    parts = fake_engine_parts(
        model=ENDLESS, fail=lambda request_id, position: "NaN logits" if (request_id, position) == (1, 6) else None
    )
    async with run_engine(parts) as server, AttachClient.open(server.address) as client:
        failed, good = await client.generate(submission(1, [1] * 4, 30), submission(2, [2] * 4, 30))
    assert failed.completion is not None
    assert failed.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
    assert failed.completion.detail == "NaN logits"
    assert len(good.token_ids) == 30


@pytest.mark.usefixtures("no_linger")
@pytest.mark.parametrize("coalescing", [None, CoalescePolicy(3600.0)], ids=["at once", "tokens wait"])
async def test_a_failed_step_ends_every_request_and_the_engine(coalescing: CoalescePolicy | None) -> None:
    has_first = threading.Event()

    def on_step(plan: SchedulerOutput) -> None:
        if plan.step == 2:  # later tokens wait, if they may, when the first ones have gone
            assert has_first.wait(30)
        if plan.step == 5:
            raise RuntimeError("the device is gone")

    engine = run_engine(fake_engine_parts(model=ENDLESS, on_step=on_step), coalescing=coalescing)
    server = await engine.__aenter__()
    async with AttachClient.open(server.address, acks=False) as client:
        await client.submit(submission(1, [1], 30), submission(2, [2], 30))
        await client.until(lambda: all(client.received[handle].token_ids for handle in (1, 2)))
        has_first.set()
        answers = await client.ended(1, 2)
        assert [len(answer.token_ids) for answer in answers] == [4, 4], "tokens of the steps before are lost"
        with pytest.raises(EOFError):
            await client.until(lambda: False)
    with pytest.raises(StepError, match="the device is gone"):
        await engine.__aexit__(None, None, None)
    assert client.statuses[-1].state == pb.ENGINE_STATE_FAILED
    for answer in answers:
        assert answer.completion is not None
        assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
        assert "the device is gone" in answer.completion.detail


@pytest.mark.usefixtures("no_linger")
async def test_drain_finishes_open_requests_and_rejects_new_ones() -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_engine(fake_engine_parts(model=ENDLESS, on_step=gate)))
        stack.callback(gate.open)
        async with AttachClient.open(server.address, acks=False) as client:
            await client.submit(submission(1, [1], 50))
            await gate.holds()
            server.engine.drain(20.0)
            await client.submit(submission(2, [2], 5))
            await client.until_read()
            gate.open()
            finished, refused = await client.ended(1, 2)
            with pytest.raises(EOFError, match="OK"):
                await client.until(lambda: False)
    assert len(finished.token_ids) == 50
    assert refused.rejection is not None
    assert refused.rejection.reason == pb.REJECTION_REASON_DRAINING
    assert [notice.grace.seconds for notice in client.drains] == [20]
    assert client.statuses[-1].state == pb.ENGINE_STATE_DRAINING


async def test_drain_cancels_requests_that_exceed_its_grace() -> None:
    async with run_engine(fake_engine_parts(model=ENDLESS)) as server, AttachClient.open(server.address) as client:
        await client.submit(submission(1, [1], 200, token_credit=2))
        await client.until(lambda: len(client.received[1].token_ids) == 2)
        server.engine.drain(0.2)
        (answer,) = await client.ended(1)
    assert answer.completion is not None
    assert answer.completion.reason == pb.COMPLETION_REASON_CANCELLED


class Work:
    """A step that spins until `may_end`, with or without visible progress."""

    def __init__(self, *, has_progress: bool) -> None:
        self._has_progress = has_progress
        self._num_done = itertools.count()
        self.may_end = False

    def spin(self, _plan: SchedulerOutput) -> None:
        while not self.may_end:
            pass

    def progress(self) -> int:
        return next(self._num_done) if self._has_progress else 0


@pytest.mark.parametrize("has_progress", [False, True])
async def test_a_step_without_progress_is_reported_as_stalled_and_a_long_one_is_not(
    has_progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.serving.server.HEARTBEAT_S", 0.005)
    monkeypatch.setattr("engine.serving.stall.MIN_STALL_S", 0.05)
    work = Work(has_progress=has_progress)
    parts = replace(fake_engine_parts(model=ENDLESS, on_step=work.spin), progress=work.progress)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_engine(parts))
        stack.callback(setattr, work, "may_end", True)
        async with AttachClient.open(server.address) as client:
            await client.submit(submission(1, [1], 9))
            if has_progress:
                await client.until(lambda: _num_checks_of_one_step(client) > 30)  # three times the limit
                assert not any(status.is_stalled for status in client.statuses)
            else:
                await client.until(lambda: client.statuses and client.statuses[-1].is_stalled)
            work.may_end = True
            await client.ended(1)
            await client.until(lambda: not client.statuses[-1].is_stalled)


def _num_checks_of_one_step(client: AttachClient) -> int:
    """Returns the number of statuses with the loop at the same turn as in the newest."""
    return sum(status.loop_turns == client.statuses[-1].loop_turns for status in client.statuses)
