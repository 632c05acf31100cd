"""Simulates a router with engines that die, hang, drain, fill up, restart and change their model, on its own clock.

Sessions, failover, placement and streams are real, only sockets are replaced. At the end, all requests have ended as
the oracle expects, and no state is left.
"""

import asyncio
import random
import time
from types import SimpleNamespace

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from frontend.errors import DeadlineExceeded, EngineUnavailable, QueueFull, ServerDraining
from frontend.routing import failover, router, wire
from frontend.routing.pending import PendingRequest
from frontend.routing.stream import CancelReason
from frontend.text.served_model import ModelKey
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE
from tests.support.frontend.fake_requests import FakeRequest
from tests.support.frontend.memory_connection import MemoryConnection

TICK_S = 0.05
FAILOVER_TIMEOUT_S = 30.0
SERVING, DRAINING = pb.ENGINE_STATE_SERVING, pb.ENGINE_STATE_DRAINING


def key(name):
    return ModelKey(name, "none", b"", 4096, VOCAB_SIZE, (END_TOKEN_ID,), 20)


class FakeConnection(MemoryConnection):
    """An engine and the connection to it; messages take one tick."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.requests = {}
        self.is_hung = False
        self.is_full = False
        self.ends_in = 0  # ticks, while it drains
        self._step_seq = 0

    def come(self, name):
        self.requests, self._step_seq = {}, 0
        self.is_hung = self.is_full = False
        self.attach(key(name), block_size=16)

    def tick(self, rng):
        if self.attachment is None or self.is_hung:
            return
        session = self.attachment.session
        for command in session.take_commands():
            self._apply(command, session)
        if rng.random() < 0.9:
            self._step(session, rng)
        if self.engine_state == DRAINING:
            self.ends_in -= 1
            if self.ends_in <= 0 or not session.num_open:
                for request in self.requests.values():
                    request.cancelled = True
                self._step(session, rng)
                self.die()

    def _apply(self, command, session):
        rejections = []
        for submission in command.submit.submissions:
            assert submission.handle not in self.requests, "the handle is in use"
            assert submission.request_id.split()[0] == self.attachment.model.name, "of another model"
            reason = None
            if self.engine_state == DRAINING:
                reason = pb.REJECTION_REASON_DRAINING
            elif self.is_full:
                reason = pb.REJECTION_REASON_QUEUE_FULL
            if reason is not None:
                rejections.append(pb.Rejection(handle=submission.handle, epoch=submission.epoch, reason=reason))
            else:
                request = FakeRequest(submission, max_model_len=4096, now_s=time.monotonic())
                self.requests[submission.handle] = request
        if rejections:
            session.on_admission(pb.AdmissionResult(rejections=rejections))
        for handle in command.cancel.handles:
            if handle in self.requests:
                self.requests[handle].cancelled = True
        for handle, tokens in zip(command.credit.handles, command.credit.tokens, strict=True):
            if handle in self.requests:
                self.requests[handle].credit += tokens

    def _step(self, session, rng):
        step = pb.StepResult()
        for request in list(self.requests.values()):
            request.advance(step, rng.randrange(1, 4), time.monotonic())
        for completion in step.completions:
            del self.requests[completion.handle]
        if step.handles or step.completions:
            self._step_seq += 1
            step.step_seq = self._step_seq
            session.on_step(step)
            session.check_integrity()


class Client:
    """One request and its outcome."""

    def __init__(self, request, expected, *, may_be_late, born_at_s):
        self.request, self.stream, self.expected = request, request.stream, expected
        self.may_be_late, self.born_at_s = may_be_late, born_at_s
        self.token_ids = []
        self.end = self.error = None
        self.has_left = False
        self.pause = asyncio.Event()
        self.pause.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        try:
            while self.end is None:
                batch = await self.stream.take()
                assert batch.first_index == len(self.token_ids), "a gap, or a token twice"
                self.token_ids += batch.token_ids
                self.end = batch.end
                await self.pause.wait()
        except (EngineUnavailable, QueueFull, DeadlineExceeded) as error:
            self.error = error

    def leave(self):
        self.has_left = True
        self.stream.close(CancelReason.CLIENT)
        self.task.cancel()

    def check(self):
        stream, now_s = self.stream, time.monotonic()
        assert stream.closed
        assert self.token_ids == self.expected[: len(self.token_ids)]
        told = stream.clock.engine_time(now_s)
        if told is not None:
            parts_s = told.queued_s + told.prefill_s + told.parked_s + told.preempted_s + told.moved_s
            assert parts_s <= now_s - self.born_at_s + 0.01
        if self.has_left:
            return
        assert self.task.done()
        if isinstance(self.error, DeadlineExceeded) or (self.end and self.end.reason is EndReason.TIME_BUDGET):
            assert self.may_be_late
        elif isinstance(self.error, QueueFull):
            assert not self.token_ids
            assert self.request.epoch == 0
        elif self.error is None:
            assert self.token_ids == self.expected
            assert self.end.num_output_tokens == len(self.expected)


class World:
    def __init__(self, rng, clock, metrics):
        self.rng, self.clock, self.metrics = rng, clock, metrics
        num_engines = rng.randrange(1, 5)
        self.router = router.Router(
            [f"127.0.0.1:{port}" for port in range(1, num_engines + 1)],
            None,
            metrics,
            heartbeat_timeout_s=5.0,
            step_timeout_s=0.0,
            failover_timeout_s=FAILOVER_TIMEOUT_S,
            max_moves=10_000,  # no request is a poison request here
            on_change=lambda: None,
        )
        self.router.start()
        self.engines = list(self.router._connections.values())
        self.clients = []
        self.window = rng.choice([1, 4, 64])

    async def tick(self):
        self.clock.now_s += TICK_S
        for engine in self.engines:
            engine.tick(self.rng)
        for _ in range(6):
            await asyncio.sleep(0)  # timers of the failover, readers
        assert self.metrics.num_without_engine == self.router.num_waiting

    def submit(self):
        rng, now_s = self.rng, time.monotonic()
        try:
            model = self.router.attachment().model
        except EngineUnavailable:
            return
        prompt_ids = [rng.randrange(1, 250) for _ in range(rng.randrange(1, 40))]
        max_tokens = rng.randrange(1, 60)
        limit_ms = rng.random() < 0.15 and rng.randrange(3000)
        kind = rng.choice(["deadline", "budget"])
        submission = pb.Submission(
            prompt_ids=wire.ids_to_bytes(prompt_ids),
            stops=pb.TokenStops(
                max_tokens=max_tokens, time_budget_ms=limit_ms if limit_ms and kind == "budget" else None
            ),
            remaining_ms=limit_ms if limit_ms and kind == "deadline" else None,
            request_id=f"{model.name} {len(self.clients)}",
        )
        request = PendingRequest(submission, model.key, window=self.window, coalesce=rng.random() < 0.5, now_s=now_s)
        self.router.submit(request)
        expected = [*prompt_ids, END_TOKEN_ID][:max_tokens]
        self.clients.append(Client(request, expected, may_be_late=bool(limit_ms), born_at_s=now_s))

    def disturb(self):
        rng = self.rng
        engine = rng.choice(self.engines)
        match rng.randrange(10):
            case 0 | 1:
                engine.die()
            case 2 | 3 | 4 if engine.attachment is None:
                engine.come(rng.choice(["a", "a", "a", "b"]))
            case 5 if engine.serving:
                engine.ends_in = rng.randrange(30)
                engine.engine_state = DRAINING  # and reports it only later
            case 6:
                self.router.on_changed()
            case 7:
                engine.is_hung = not engine.is_hung  # until it dies, or goes on
            case 8:
                engine.is_full = not engine.is_full
        for client in rng.sample(self.clients, min(3, len(self.clients))):
            match rng.randrange(8):
                case 0:
                    client.leave()
                case 1 | 2 if client.pause.is_set():
                    client.pause.clear()
                case _:
                    client.pause.set()

    def is_idle(self):
        return all(client.stream.closed for client in self.clients) and not any(
            engine.num_open for engine in self.engines
        )


@pytest.fixture
def clock(monkeypatch):
    """The clock of everything here, the event loop's timers included; it rounds alike in every run."""
    clock = SimpleNamespace(now_s=1e6)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.now_s)
        patch.setattr(router, "EngineConnection", FakeConnection)
        yield clock


class NoMetrics:
    """Engines without series."""

    def __init__(self):
        self.num_without_engine = 0

    def note_without_engine(self, num_requests):
        self.num_without_engine = num_requests

    def engine(self, address):
        return SimpleNamespace(engine="0", count_lost=lambda num_requests: None)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(60))
async def test_every_request_ends_once_with_the_right_tokens(seed, clock, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(failover, "random", random.Random(seed))  # its pauses: a seed is one world
    world = World(rng, clock, NoMetrics())
    world.engines[0].come("a")
    for _ in range(250):
        for _ in range(rng.randrange(3)):
            world.submit()
        if rng.random() < 0.4:
            world.disturb()
        await world.tick()
    # From here on nothing goes wrong: all must come to an end, whatever has been.
    for engine in world.engines:
        if engine.engine_state != DRAINING and (engine.attachment is None or engine.attachment.model.name != "a"):
            engine.die()
            engine.come("a")
        engine.is_hung = engine.is_full = False
    for client in world.clients:
        client.pause.set()
    num_ticks = 0
    while not world.is_idle():
        await world.tick()
        num_ticks += 1
        assert num_ticks * TICK_S < FAILOVER_TIMEOUT_S + 30, "a request starves"
        if not any(engine.serving for engine in world.engines):
            for engine in world.engines:
                if engine.attachment is None:
                    engine.come("a")
    await asyncio.gather(*(client.task for client in world.clients), return_exceptions=True)
    for client in world.clients:
        client.check()
    whole = sum(client.end is not None for client in world.clients)
    assert whole > len(world.clients) / 4
    assert world.router.num_waiting == 0
    quarantine = world.router._failover._quarantine
    assert quarantine.has_capacity
    assert not quarantine._on_trial
    attached = {engine.attachment.instance_id for engine in world.engines if engine.attachment is not None}
    assert sorted(attachment.instance_id for attachment in world.router._attached) == sorted(attached)
    assert world.router._placement._sent.keys() <= attached
    for engine in world.engines:
        assert engine.requests == {}
        if engine.attachment is not None:
            engine.attachment.session.check_integrity()
    await world.router.stop(ServerDraining("over"))
    assert world.router._failover._timer is None


async def test_an_engine_that_rejected_a_request_is_asked_again_if_the_others_are_lost_before_their_turn(clock):
    world = World(random.Random(1), clock, NoMetrics())  # with several engines
    full, other = world.engines[:2]
    full.come("a")
    full.is_full = True
    world.submit()
    (client,) = world.clients
    other.come("a")
    full.tick(random.Random(0))  # the rejection: the other engine is next
    other.die()
    full.is_full = False
    for _ in range(100):
        await world.tick()
    assert client.stream.closed
    client.check()
    await world.router.stop(ServerDraining("over"))
