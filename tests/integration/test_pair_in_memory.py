"""Engines and a router without sockets, on one clock: everything of the pair between text and device is real.

Engines are killed, drained and restarted at the same address at random, and streams to living engines break, with
messages of both directions on their way; clients leave, pause and have little time. Every answer is that of the model
alone, with its log-probabilities and those of its prompt.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.drafts import DraftLimits
from engine.core.latency.step_time import Coefficients, StepTimePrior
from engine.core.request import SamplingParams
from engine.core.schedulers import make_scheduler
from engine.interfaces import Command, Inbox
from engine.serving.outgoing import Outgoing
from engine.serving.server import EngineService
from engine.step_loop import StepLoop
from frontend.errors import DeadlineExceeded, EngineUnavailable, QueueFull, RequestError, ServerDraining
from frontend.routing import failover, router, wire
from frontend.routing.pending import PendingRequest
from frontend.routing.session import EngineSession
from frontend.routing.stream import CancelReason
from frontend.text.served_model import ModelKey
from tests.support.engine.fake_engine import fake_engine_parts
from tests.support.engine.fake_model import FakeModel, FakeModelRunner
from tests.support.frontend.memory_connection import MemoryConnection

TICK_S = 0.02
MAX_MODEL_LEN = 96
MODEL = FakeModel(vocab_size=40, end_token_ids=frozenset({0}), end_probability=0.03)
KEY = ModelKey("fake", "none", b"", MAX_MODEL_LEN, MODEL.vocab_size, (0,), 5)


class ReadyInbox(Inbox):
    """Never waits: the test turns the loop."""

    def drain(self, timeout_s: float) -> list[Command]:
        return super().drain(0.0)


class Engine:
    """The serving side and the step loop of one engine process, turned by the test."""

    def __init__(self, rng: random.Random) -> None:
        config = SchedulerConfig(
            num_blocks=rng.choice((26, 60)),
            block_size=4,
            max_num_seqs=rng.choice((3, 12)),
            max_num_batched_tokens=rng.choice((8, 64)),
            max_model_len=MAX_MODEL_LEN,
            max_waiting=rng.choice((4, 100)),
            end_token_ids=MODEL.end_token_ids,
            max_steps_in_flight=rng.choice((1, 2)),
            policy=rng.choice(("fcfs", "priority", "slo")),
            step_time=StepTimePrior(Coefficients(0.01, 1e-4, 1e-4, 1e-6, 1e-7)),
        )
        if config.policy != "slo" and config.max_num_seqs > 3 and rng.random() < 0.5:
            config = replace(config, drafts=DraftLimits(3, 2, 1), max_steps_in_flight=1)
        self.salts: dict[int, bytes] = {}
        self.scheduler = make_scheduler(config)
        runner = FakeModelRunner(
            MODEL, num_blocks=config.num_blocks, block_size=4, salt_of=lambda request_id: self.salts[request_id]
        )
        add_request = self.scheduler.add_request

        def add(request: Any) -> None:
            self.salts[request.request_id] = request.cache_salt
            add_request(request)

        self.scheduler.add_request = add  # type: ignore[method-assign]
        self.service = EngineService()
        inbox = ReadyInbox()
        self.loop = StepLoop(self.scheduler, runner, inbox, self.service.deliver, clock=time.monotonic)
        parts = replace(
            fake_engine_parts(model=MODEL, max_model_len=MAX_MODEL_LEN),
            scheduler=self.scheduler,
            max_open_requests=config.max_waiting + config.max_num_seqs,
        )
        self.service.set_serving(parts, inbox, lambda: self.loop.snapshot)
        self.attach()

    def attach(self) -> None:
        """Opens the stream of a frontend."""
        self.outgoing = Outgoing()
        self.session = self.service.open_session(self.outgoing, 1)

    def detach(self) -> None:
        """The stream has ended."""
        del self.service._sessions[self.session.session_id]
        self.session.abandon()

    def turn(self) -> None:
        self.loop.turn()
        self.scheduler.check_integrity()


class Connection(MemoryConnection):
    """What `EngineConnection` does, with queues instead of a socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine: Engine | None = None
        self._to_engine: deque[bytes] = deque()
        self._to_frontend: deque[bytes] = deque()

    def come(self, rng: random.Random) -> None:
        self.engine = Engine(rng)
        self.attach(KEY, block_size=4)

    def break_stream(self) -> None:
        """The frontend attaches anew, while the engine still has rows of the old stream in flight."""
        engine = self.engine
        assert engine is not None
        self.die()
        engine.detach()
        engine.attach()
        self.engine = engine
        self.attach(KEY, block_size=4)

    def die(self, parting_error: RequestError | None = None) -> None:
        self.engine = None
        self._to_engine.clear()
        self._to_frontend.clear()
        super().die(parting_error)

    def tick(self, rng: random.Random) -> None:
        if self.engine is None or self.attachment is None:
            return
        engine, session = self.engine, self.attachment.session
        if rng.random() < 0.8:
            self._to_engine.extend(command.SerializeToString() for command in session.take_commands())
        for _ in range(rng.randrange(len(self._to_engine) + 1)):
            engine.session.handle(pb.AttachRequest.FromString(self._to_engine.popleft()))
        for _ in range(rng.randrange(3)):
            engine.turn()
        if rng.random() < 0.8:
            while (message := engine.outgoing._take_message()) is not None:
                self._to_frontend.append(message.SerializeToString())
        for _ in range(rng.randrange(len(self._to_frontend) + 1)):
            self._take(pb.AttachResponse.FromString(self._to_frontend.popleft()), session)
        session.check_integrity()
        is_drained = engine.loop._drain_until_s is not None and not engine.loop._open
        if is_drained and not (self._to_engine or self._to_frontend or engine.session.num_open):
            self.die()

    def _take(self, message: pb.AttachResponse, session: EngineSession) -> None:
        match message.WhichOneof("event"):
            case "step":
                session.on_step(message.step)
                session.note_load(message.step.load)
            case "admission":
                session.on_admission(message.admission)
            case "status":
                self._note_state(message.status.state)
            case "drain":
                self._note_state(pb.ENGINE_STATE_DRAINING)

    def _note_state(self, state: "pb.EngineState") -> None:
        if state != self.engine_state:
            self.set_state(state)


class Client:
    """One request, and what its client got."""

    def __init__(self, request: PendingRequest, expected: Any, *, has_limit: bool) -> None:
        self.stream, self.expected, self.has_limit = request.stream, expected, has_limit
        self.request = request
        self.token_ids: list[int] = []
        self.chosen: list[float] = []
        self.end: Any = None
        self.error: RequestError | None = None
        self.has_left = False
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while self.end is None:
                batch = await self.stream.take()
                assert batch.first_index == len(self.token_ids), "a gap, or a token twice"
                self.token_ids += batch.token_ids
                if batch.logprobs is not None:
                    self.chosen += batch.logprobs.chosen
                self.end = batch.end
                await self.may_read.wait()
        except (EngineUnavailable, QueueFull, DeadlineExceeded) as error:
            self.error = error

    def leave(self) -> None:
        self.has_left = True
        self.stream.close(CancelReason.CLIENT)
        self.task.cancel()

    def check(self) -> None:
        assert self.stream.closed
        num_tokens = len(self.token_ids)
        assert tuple(self.token_ids) == self.expected.token_ids[:num_tokens]
        if self.request.submission.HasField("top_logprobs"):
            assert self.chosen == pytest.approx(self.expected_logprobs()[:num_tokens])
        if (prompt := self.stream.prompt_logprobs) is not None:
            known = [chosen for piece in prompt.pieces(100) for chosen in piece.chosen]
            expected = self.prompt_scores([])
            assert known == pytest.approx(expected if num_tokens else expected[: len(known)])
        if self.has_left:
            return
        assert self.task.done()
        if self.error is None and self.end.reason is not EndReason.TIME_BUDGET:
            assert tuple(self.token_ids) == self.expected.token_ids
            assert self.end.reason is self.expected.reason
        elif self.error is None or isinstance(self.error, DeadlineExceeded):
            assert self.has_limit
        elif isinstance(self.error, QueueFull):
            assert (num_tokens, self.request.epoch) == (0, 0)

    def expected_logprobs(self) -> list[float]:
        return self.prompt_scores(self.token_ids)[self.request.num_prompt_tokens - 1 :]

    def prompt_scores(self, token_ids: list[int]) -> list[float]:
        """What the model alone gives for the prompt and these tokens, from the second on."""
        submission = self.request.submission
        ids = [*wire.ids_from_bytes(submission.prompt_ids), *token_ids]
        scores = MODEL.solo_prompt_logprobs(ids, 0, cache_salt=submission.cache_salt)
        return [score.chosen for score in scores]


class World:
    def __init__(self, rng: random.Random, clock: Any) -> None:
        self.rng, self.clock = rng, clock
        metrics: Any = SimpleNamespace(
            note_without_engine=lambda _: None,
            engine=lambda address: SimpleNamespace(engine="0", count_lost=lambda _: None),
        )
        addresses = [f"127.0.0.1:{port}" for port in range(1, rng.randrange(2, 4))]
        self.router = router.Router(
            addresses,
            None,  # type: ignore[arg-type]
            metrics,
            heartbeat_timeout_s=5.0,
            step_timeout_s=0.0,
            failover_timeout_s=30.0,
            max_moves=10_000,
            on_change=lambda: None,
        )
        self.router.start()
        self.connections: list[Any] = list(self.router._connections.values())
        self.clients: list[Client] = []
        self.window = rng.choice((1, 3, 16))

    async def tick(self) -> None:
        self.clock.now_s += TICK_S
        for connection in self.connections:
            connection.tick(self.rng)
        for _ in range(6):
            await asyncio.sleep(0)

    def submit(self) -> None:
        rng = self.rng
        prompt_ids = [rng.randrange(1, 4)] * rng.randrange(1, 40)
        max_tokens, salt = rng.randrange(1, 50), rng.choice((b"", b"", b"salt"))
        stops = {"max_tokens": max_tokens, "stop_token_ids": rng.choice(((), (7,)))}
        stops["min_tokens"] = rng.choice((0, 0, min(5, max_tokens)))
        limit_ms = rng.choice((None, None, None, rng.randrange(1, 3000)))
        kind = rng.choice(("remaining_ms", "time_budget_ms"))
        submission = pb.Submission(
            prompt_ids=wire.ids_to_bytes(prompt_ids),
            sampling=pb.Sampling(seed=rng.randrange(2**64), top_p=1.0, repetition_penalty=1.0),
            stops=pb.TokenStops(**stops, time_budget_ms=limit_ms if kind == "time_budget_ms" else None),
            remaining_ms=limit_ms if kind == "remaining_ms" else None,
            top_logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, 0, 2)),
            priority=rng.randrange(3),
            cache_salt=salt,
            ttft_remaining_ms=rng.choice((None, 500)),
            inter_token_us=rng.choice((None, 30_000)),
            tenant=rng.choice(("", "a", "b")),
        )
        params = SamplingParams(seed=submission.sampling.seed, **stops)  # type: ignore[arg-type]
        expected = MODEL.solo_output(prompt_ids, params, max_model_len=MAX_MODEL_LEN, cache_salt=salt)
        request = PendingRequest(
            submission, KEY, window=self.window, coalesce=rng.random() < 0.5, now_s=time.monotonic()
        )
        self.router.submit(request)
        self.clients.append(Client(request, expected, has_limit=limit_ms is not None))

    def disturb(self) -> None:
        rng = self.rng
        connection = rng.choice(self.connections)
        if connection.engine is None:
            connection.come(rng)
        elif (kind := rng.random()) < 0.4:
            connection.die()
        elif kind < 0.7 and connection.serving:
            connection.break_stream()
        else:
            connection.engine.loop.drain(rng.random())
        for client in rng.sample(self.clients, min(3, len(self.clients))):
            match rng.randrange(6):
                case 0:
                    client.leave()
                case 1 | 2:
                    client.may_read.clear()
                case _:
                    client.may_read.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The clock of everything here, the event loop's timers included; it rounds alike in every run."""
    clock = SimpleNamespace(now_s=1e6)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.now_s)
        patch.setattr(router, "EngineConnection", Connection)
        yield clock


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
async def test_every_answer_is_that_of_the_model_alone_whatever_becomes_of_engines(
    seed: int, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(failover, "random", random.Random(seed))  # its pauses: a seed is one world
    world = World(rng, clock)
    world.connections[0].come(rng)
    for _ in range(200):
        for _ in range(rng.randrange(2)):
            world.submit()
        if rng.random() < 0.1:
            world.disturb()
        await world.tick()
    is_done: Callable[[], bool] = lambda: all(client.stream.closed for client in world.clients)  # noqa: E731
    for num_ticks in range(3000):
        for connection in world.connections:
            if connection.engine is None:
                connection.come(rng)
        for client in world.clients:
            client.may_read.set()
        if is_done() and not any(connection.num_open for connection in world.connections):
            break
        assert num_ticks < 2999, "a request starves"
        await world.tick()
    await asyncio.gather(*(client.task for client in world.clients), return_exceptions=True)
    for client in world.clients:
        client.check()
    assert sum(client.error is None and client.end is not None for client in world.clients) > len(world.clients) / 6
    assert sum(client.request.epoch for client in world.clients) > 0
    for connection in world.connections:
        connection.engine.turn()
        assert connection.engine.scheduler.stats().num_running == 0
        assert not connection.engine.service._owners
    await world.router.stop(ServerDraining("over"))
