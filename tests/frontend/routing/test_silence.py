"""Time lost with a hanging engine counts as moved, except the time spent waiting for the client."""

import asyncio
from types import SimpleNamespace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineUnavailable
from frontend.generation.answer.timing import timing
from frontend.routing import pending, session, stream
from frontend.routing.pending import PendingRequest
from frontend.routing.session import EngineSession
from frontend.types import AnswerTimes

PARTS = ("queued", "tokenized", "prefill", "decode", "parked", "preempted", "moved")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""
    clock = SimpleNamespace(now_s=100.0)
    for module in (stream, session, pending):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


class Engine:
    """Takes requests, and sends steps when the test asks for them."""

    def __init__(self):
        self.session = EngineSession(
            vocab_size=10, block_size=16, step_window=4, wake=lambda: None, on_rejected=lambda *_, **__: None
        )
        self.num_steps = 0

    def step(self, request, num_tokens=1, **times_us):
        self.num_steps += 1
        handle, epoch = request.submission.handle, request.epoch
        step = pb.StepResult(
            step_seq=self.num_steps,
            handles=[handle],
            token_counts=[num_tokens],
            token_ids=[7] * num_tokens,
            start_indices=[request.stream.num_tokens],
            epochs=[epoch],
        )
        if times_us:
            step.time_accounts.add(handle=handle, epoch=epoch, **times_us)
        self.session.on_step(step)

    def lose(self):
        """Loses the engine as the router does; returns the requests that were open."""
        list(self.session.take_commands())
        requests, _ = self.session.end(EngineUnavailable("gone", retry_after_s=1.0))
        for request in requests:
            request.detach(lambda _: None, was_taken=True, heard_at_s=self.session.heard_at_s)
        return requests


def make_request(*, window=8):
    return PendingRequest(pb.Submission(stops=pb.TokenStops(max_tokens=100)), None, window=window, now_s=100.0)


def parts(request, clock):
    """Seconds by part; the parts add up to the total."""
    times = request.stream.clock
    account = timing(
        AnswerTimes(accepted_at_s=100.0, tokenized_s=0.0, submitted_at_s=100.0),
        times.engine_time(clock.now_s),
        first_token_at_s=times.first_token_at_s,
        client_wait_s=0.0,
        now_s=clock.now_s,
    )
    seconds = {part: getattr(account, part).ToMicroseconds() / 1e6 for part in PARTS}
    assert sum(seconds.values()) == account.total.ToMicroseconds() / 1e6 == clock.now_s - 100.0
    return {part: value for part, value in seconds.items() if value}


def test_hang_between_two_tokens_counts_as_moved(clock):
    request, first, second = make_request(), Engine(), Engine()
    first.session.submit(request)
    clock.now_s += 3
    first.step(request, queued_us=1_000_000, prefill_us=2_000_000)
    clock.now_s += 2
    first.step(request)
    clock.now_s += 5  # it hangs
    assert first.lose() == [request]
    assert request.epoch == 1
    clock.now_s += 0.5
    second.session.submit(request)
    clock.now_s += 1.25
    second.step(request, queued_us=250_000, prefill_us=1_000_000)
    clock.now_s += 4
    assert parts(request, clock) == {"queued": 1, "prefill": 2 + 1, "decode": 2 + 4, "moved": 5 + 0.5 + 0.25}


def test_request_in_the_queue_of_a_hanging_engine_waited_until_its_last_step(clock):
    request, other, engine = make_request(), make_request(), Engine()
    engine.session.submit(other)
    engine.session.submit(request)
    clock.now_s += 4
    engine.step(other)
    clock.now_s += 6
    assert engine.lose() == [other, request]
    second = Engine()
    second.session.submit(request)
    clock.now_s += 1
    second.step(request, prefill_us=1_000_000)
    assert parts(request, clock) == {"queued": 4, "prefill": 1, "moved": 6}


def test_hang_between_admission_and_first_step_counts_as_moved(clock):
    request, engine = make_request(), Engine()
    engine.session.submit(request)
    clock.now_s += 0.5
    engine.session.on_admission(pb.AdmissionResult(accepted_handles=[request.submission.handle]))
    clock.now_s += 5
    engine.lose()
    time = request.stream.clock.engine_time(clock.now_s)
    assert (time.queued_s, time.moved_s) == (0.5, 5)


async def test_time_spent_waiting_for_the_client_does_not_count_as_moved(clock):
    request, engine = make_request(window=4), Engine()
    engine.session.submit(request)
    engine.step(request, prefill_us=0)
    await request.stream.take()  # the reader is busy with it
    engine.step(request, 3)  # and there is no credit left
    clock.now_s += 7
    await request.stream.take()  # the reader comes back, but the engine hangs
    reader = asyncio.create_task(request.stream.take())
    await asyncio.sleep(0)  # its first turn returns the credit
    clock.now_s += 5
    engine.lose()
    time = request.stream.clock.engine_time(clock.now_s)
    assert (time.parked_s, time.moved_s) == (7, 5)
    reader.cancel()


async def test_engine_lost_while_the_request_is_paused_was_not_silent(clock):
    request, engine = make_request(window=4), Engine()
    engine.session.submit(request)
    engine.step(request, prefill_us=0)
    await request.stream.take()
    engine.step(request, 3)
    clock.now_s += 7
    engine.lose()
    time = request.stream.clock.engine_time(clock.now_s)
    assert (time.parked_s, time.moved_s) == (7, 0)


def test_engine_that_drops_a_request_was_not_silent(clock):
    request, engine = make_request(), Engine()
    engine.session.submit(request)
    engine.step(request, prefill_us=0)
    clock.now_s += 9
    request.detach(lambda _: None, was_taken=True)
    assert request.stream.clock.engine_time(clock.now_s).moved_s == 0
