"""An engine that hangs is lost late: what it cost stands in the account as a move, save for waits for the client."""

import asyncio
import dataclasses

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineUnavailable
from frontend.generation.answer.timing import timing
from frontend.routing import session
from frontend.routing import stream as request_stream
from frontend.routing.pending import PendingRequest
from frontend.routing.session import EngineSession
from frontend.routing.stream import RequestStream
from frontend.types import AnswerTimes

PARTS = ("queued", "tokenized", "prefill", "decode", "parked", "preempted", "moved")


class Clock:
    """Stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (request_stream, session):
        monkeypatch.setattr(module, "time", clock)
    return clock


@dataclasses.dataclass
class Engine:
    """Takes requests and sends steps by hand."""

    session: EngineSession
    num_steps: int = 0

    def step(self, stream: RequestStream, num_tokens: int = 1, **times_us: int) -> None:
        self.num_steps += 1
        step = pb.StepResult(
            step_seq=self.num_steps,
            handles=[stream.handle] if num_tokens else [],
            token_counts=[num_tokens] if num_tokens else [],
            token_ids=[7] * num_tokens,
            start_indices=[stream.num_tokens] if num_tokens else [],
            epochs=[stream.epoch] if num_tokens else [],
        )
        if times_us:
            step.time_accounts.add(handle=stream.handle, epoch=stream.epoch, **times_us)
        self.session.deal_step(step)

    def lose(self) -> list[PendingRequest]:
        return self.session.end(EngineUnavailable("gone", retry_after_s=1.0))


class Nobody:
    def grant(self, handle, num_tokens):
        pass

    def cancel(self, handle, reason):
        pass


def make_engine() -> Engine:
    return Engine(EngineSession(vocab_size=10, step_window=4, wake=lambda: None, give_back=lambda *_, **__: None))


def make_ticket(*, window=8):
    return PendingRequest(pb.Submission(stops=pb.TokenStops(max_tokens=100)), None, window=window, now_s=100.0)


def parts(stream, clock):
    """Seconds by part; the parts make up the whole."""
    account = timing(
        AnswerTimes(accepted_at_s=100.0, tokenized_s=0.0, submitted_at_s=100.0),
        stream.engine_time(clock.now_s),
        first_token_at_s=stream.first_token_at_s,
        client_wait_s=0.0,
        now_s=clock.now_s,
    )
    told = {part: getattr(account, part).ToMicroseconds() / 1e6 for part in PARTS}
    assert sum(told.values()) == account.total.ToMicroseconds() / 1e6 == clock.now_s - 100.0
    return {part: seconds for part, seconds in told.items() if seconds}


def test_hang_between_two_tokens_is_a_move(clock):
    pending, first, second = make_ticket(), make_engine(), make_engine()
    first.session.submit(pending)
    clock.now_s += 3
    first.step(pending.stream, queued_us=1_000_000, prefill_us=2_000_000)
    clock.now_s += 2
    first.step(pending.stream)
    clock.now_s += 5  # it hangs
    (lost,) = first.lose()
    assert lost is pending
    pending.stream.leave(Nobody(), was_taken=True)
    clock.now_s += 0.5
    second.session.submit(pending)
    clock.now_s += 1.25
    second.step(pending.stream, queued_us=250_000, prefill_us=1_000_000)
    clock.now_s += 4
    assert parts(pending.stream, clock) == {"queued": 1, "prefill": 2 + 1, "decode": 2 + 4, "moved": 5 + 0.5 + 0.25}


def test_request_in_the_queue_of_an_engine_that_hangs_waited_until_its_last_step(clock):
    pending, other, engine = make_ticket(), make_ticket(), make_engine()
    engine.session.submit(other)
    engine.session.submit(pending)
    clock.now_s += 4
    engine.step(other.stream)
    clock.now_s += 6
    assert engine.lose() == [other, pending]
    pending.stream.leave(Nobody(), was_taken=True)
    second = make_engine()
    second.session.submit(pending)
    clock.now_s += 1
    second.step(pending.stream, prefill_us=1_000_000)
    assert parts(pending.stream, clock) == {"queued": 4, "prefill": 1, "moved": 6}


def test_engine_that_has_taken_a_request_and_hangs_before_any_step_costs_a_move(clock):
    pending, engine = make_ticket(), make_engine()
    engine.session.submit(pending)
    clock.now_s += 0.5
    engine.session.deal_admission(pb.AdmissionResult(accepted_handles=[pending.stream.handle]))
    clock.now_s += 5
    engine.lose()
    pending.stream.leave(Nobody(), was_taken=True)
    time = pending.stream.engine_time(clock.now_s)
    assert (time.queued_s, time.moved_s) == (0.5, 5)


async def test_time_for_which_the_client_was_waited_for_is_no_move(clock):
    pending, engine = make_ticket(window=4), make_engine()
    stream = pending.stream
    engine.session.submit(pending)
    engine.step(stream, prefill_us=0)
    await stream.take()  # the reader is busy with it
    engine.step(stream, 3)  # and there is no credit left
    clock.now_s += 7
    await stream.take()  # now it comes, but the engine hangs
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)  # its first turn gives the credit back
    clock.now_s += 5
    engine.lose()
    stream.leave(Nobody(), was_taken=True)
    time = stream.engine_time(clock.now_s)
    assert (time.parked_s, time.moved_s) == (7, 5)
    reader.cancel()


async def test_request_without_credit_owes_the_lost_engine_nothing(clock):
    pending, engine = make_ticket(window=4), make_engine()
    stream = pending.stream
    engine.session.submit(pending)
    engine.step(stream, prefill_us=0)
    await stream.take()
    engine.step(stream, 3)
    clock.now_s += 7
    engine.lose()
    stream.leave(Nobody(), was_taken=True)
    time = stream.engine_time(clock.now_s)
    assert (time.parked_s, time.moved_s) == (7, 0)


def test_engine_that_gives_a_request_back_has_not_been_silent(clock):
    pending, engine = make_ticket(), make_engine()
    engine.session.submit(pending)
    engine.step(pending.stream, prefill_us=0)
    clock.now_s += 9
    pending.stream.leave(Nobody(), was_taken=True)
    assert pending.stream.engine_time(clock.now_s).moved_s == 0
