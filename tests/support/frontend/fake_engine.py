"""FakeEngine: speaks the engine's side of the wire without a model, for tests and for work on the frontend alone.

It answers every prompt with the prompt itself and then its end token, one token per step, and keeps the rules of the
wire: credits, step window, one Completion per handle. Faults are scripted from outside: `rewrite_step` mangles what is
sent, `stall`, `freeze` and `kill` say it all.
"""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from chairlift.service.engine_protocol import tokenizer_sha256
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files
from tests.support.frontend.fake_requests import FakeRequest

_CHUNK_BYTES = 1 << 16
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    # As the engine's: a frontend pings after every second of silence.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
)


@dataclass(eq=False)
class _Session:
    """One attached frontend."""

    outbox: asyncio.Queue[pb.AttachResponse] = field(default_factory=asyncio.Queue)
    requests: dict[int, FakeRequest] = field(default_factory=dict)
    step_seq: int = 0
    acknowledged: int = 0
    command_seq: int = 0


class FakeEngine(EngineServiceServicer):
    """An engine without a model.

    Args:
        address: HOST:PORT (port 0 takes a free one) or unix:PATH.
        max_model_len: most tokens of prompt and answer.
        step_interval_s: pause after each step.
        tokens_per_step: tokens each request gets per step.
        step_window: StepResults sent without an acknowledgement.
        heartbeat_s: pause between status messages.
        files: what GetTokenizer sends; the byte tokenizer's files if None.
        state: what the engine says of itself.
        weights_revision: so does this.

    Attributes:
        submissions: everything submitted, in order.
        cancels: (handle, reason) of every cancellation.
        rejections: taken from the front for each submission; None accepts it.
        rewrite_step: may change a step before it is sent, or send several in its place.
        num_steps: steps done.
        load: sent with every step and status if set.
        latency: sent with every status if set.
        is_stalled: sent with every status.
        credentials: what it listens with, if it speaks TLS.
    """

    def __init__(
        self,
        *,
        address: str = "127.0.0.1:0",
        max_model_len: int = 4096,
        vocab_size: int = VOCAB_SIZE,
        step_interval_s: float = 0.0,
        tokens_per_step: int = 1,
        step_window: int = 64,
        heartbeat_s: float = 0.1,
        files: Mapping[str, bytes] | None = None,
        state: pb.EngineState = pb.ENGINE_STATE_SERVING,
        weights_revision: str = "none",
        adapters: Mapping[str, str] | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self._aliases = aliases
        self._weights_revision = weights_revision
        self.adapters = {name: fake_adapter(name, path) for name, path in (adapters or {}).items()}
        self.changes_adapters = True
        self.adapter_error: tuple[grpc.StatusCode, str] | None = None
        self.num_adapter_changes = 0
        self.address = address
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.step_interval_s = step_interval_s
        self.tokens_per_step = tokens_per_step
        self.step_window = step_window
        self.heartbeat_s = heartbeat_s
        self.files = byte_tokenizer_files() if files is None else files
        self.sha256 = tokenizer_sha256(self.files)
        self.state = state
        self.instance_id = f"fake-{uuid.uuid4().hex}"
        self.submissions: list[pb.Submission] = []
        self.cancels: list[tuple[int, int]] = []
        self.hellos: list[pb.Hello] = []
        self.rejections: list[pb.Rejection | None] = []
        self.rewrite_step: Callable[[pb.StepResult], list[pb.StepResult]] = lambda step: [step]
        self.num_steps = 0
        self.load: pb.LoadStats | None = None
        self.latency: pb.LatencyStats | None = None
        self.credentials: grpc.ServerCredentials | None = None
        self.num_tokenizer_fetches = 0
        self._sessions: set[_Session] = set()
        self._running = asyncio.Event()
        self._running.set()
        self._stalled = False
        self._frozen = False
        self._num_turns = 0
        self.is_stalled = False
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._defects: list[Exception] = []
        self._server: grpc.aio.Server | None = None

    # Life.

    async def start(self) -> str:
        """Opens the port; returns the address to attach to."""
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        add_EngineServiceServicer_to_server(self, self._server)
        if self.credentials is not None:
            port = self._server.add_secure_port(self.address, self.credentials)
        else:
            port = self._server.add_insecure_port(self.address)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._server.start()
        self._tasks = [self._run(self._step_for_ever()), self._run(self._beat_for_ever())]
        return self.address

    async def kill(self) -> None:
        """Goes away without a word: every stream breaks, the port is closed.

        Raises:
            Exception: what ended a part of it before: a frontend that broke the rules, a `rewrite_step` that failed.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
        defects, self._defects = self._defects, []
        if defects:
            raise defects[0]

    def _run(self, part: Coroutine[None, None, None], defect: type[Exception] = Exception) -> asyncio.Task[None]:
        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), defect):
                self._defects.append(error)

        task = asyncio.create_task(part)
        task.add_done_callback(note_end)
        return task

    def pause(self) -> None:
        """Makes no steps of its own any more; `step` makes one. Heartbeats go on."""
        self._running.clear()

    def resume(self) -> None:
        """Makes steps again."""
        self._running.set()
        self._work.set()

    def stall(self) -> None:
        """Falls silent with all streams open."""
        self._stalled = True

    def freeze(self) -> None:
        """Hangs: makes no steps and no turns, and sends its heartbeats all the same."""
        self._frozen = True
        self.pause()

    def thaw(self) -> None:
        """Goes on."""
        self._frozen = False
        self.resume()

    def set_state(self, state: pb.EngineState) -> None:
        """Changes the state and tells it."""
        self.state = state
        self._broadcast(pb.AttachResponse(status=self._status()))

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on this engine holds; looked at after every command, every step and every session."""
        while not condition():
            await self._changed.wait()

    @property
    def num_open(self) -> int:
        """Requests without a Completion."""
        return sum(len(session.requests) for session in self._sessions)

    @property
    def all_parked(self) -> bool:
        """Whether every request waits for credit."""
        return all(request.is_parked for session in self._sessions for request in session.requests.values())

    @property
    def has_all_acknowledged(self) -> bool:
        """Whether every step has been processed where it was sent."""
        return all(session.acknowledged == session.step_seq for session in self._sessions)

    @property
    def num_sessions(self) -> int:
        """Frontends attached."""
        return len(self._sessions)

    @property
    def command_counts(self) -> list[int]:
        """How many commands each of them has sent, its hello among them."""
        return [session.command_seq for session in self._sessions]

    # The service.

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Sends the tokenizer's files in chunks."""
        self.num_tokenizer_fetches += 1
        for name, data in self.files.items():
            for start in range(0, max(len(data), 1), _CHUNK_BYTES):
                yield pb.GetTokenizerResponse(file_name=name, data=data[start : start + _CHUNK_BYTES])

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        """Loads an adapter whose digest is that of its path."""
        await self._refuse_adapter(context)
        before, loaded = self.adapters.get(request.name), fake_adapter(request.name, request.path)
        if before is not None and not request.replace:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it has already been loaded")
        self.set_adapters(self.adapters | {request.name: loaded})
        return pb.LoadAdapterResponse(
            adapters=self._adapters(),
            sha256=loaded.sha256,
            is_new=before is None,
            has_replaced=before is not None,
        )

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        """Unloads an adapter."""
        await self._refuse_adapter(context)
        if request.name not in self.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it cannot be found")
        self.set_adapters({name: one for name, one in self.adapters.items() if name != request.name})
        return pb.UnloadAdapterResponse(adapters=self._adapters())

    async def _refuse_adapter(self, context: Any) -> None:
        if self.adapter_error is not None:
            await context.abort(*self.adapter_error)

    def set_adapters(self, adapters: Mapping[str, pb.Adapter]) -> None:
        """Changes the adapters, and tells all frontends."""
        self.adapters, self.num_adapter_changes = dict(adapters), self.num_adapter_changes + 1
        self._broadcast(pb.AttachResponse(status=self._status()))
        self._notify()

    def _adapters(self) -> pb.AdapterList:
        return pb.AdapterList(revision=self.num_adapter_changes, adapters=self.adapters.values())

    async def GetEngineStatus(self, request: pb.GetEngineStatusRequest, context: Any) -> pb.GetEngineStatusResponse:
        """State and limits."""
        return pb.GetEngineStatusResponse(status=self._status(), info=self._info(), engine_instance_id=self.instance_id)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        """The stream of one frontend."""
        first = await anext(request_iterator)
        hello = first.hello
        self.hellos.append(hello)
        self._notify()
        if hello.tokenizer_sha256 and hello.tokenizer_sha256 != self.sha256:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the frontend has another tokenizer")
        session = _Session(command_seq=first.command_seq)
        reader = self._run(self._read(session, request_iterator), AssertionError)  # gRPC's are the stream's end
        # Before the Welcome: a frontend that has it may submit before this handler runs again.
        self._sessions.add(session)
        self._notify()
        try:
            yield pb.AttachResponse(
                welcome=pb.Welcome(
                    engine_instance_id=self.instance_id,
                    session_id=f"{id(session):x}",
                    info=self._info(),
                    step_window=self.step_window,
                    status=self._status(),
                )
            )
            while True:
                yield await session.outbox.get()
        finally:
            reader.cancel()
            self._sessions.discard(session)
            self._notify()

    async def _read(self, session: _Session, requests: Any) -> None:
        async for request in requests:
            assert request.command_seq == session.command_seq + 1, "a command is missing"
            session.command_seq = request.command_seq
            match request.WhichOneof("command"):
                case "submit":
                    self._submit(session, request.submit)
                case "cancel":
                    for handle in request.cancel.handles:
                        self.cancels.append((handle, request.cancel.reason))
                        if handle in session.requests:
                            session.requests[handle].cancelled = True
                case "credit":
                    for handle, tokens in zip(request.credit.handles, request.credit.tokens, strict=True):
                        if handle in session.requests:
                            session.requests[handle].credit += tokens
                case "ack":
                    session.acknowledged = request.ack.step_seq
            self._work.set()
            self._notify()

    def _submit(self, session: _Session, batch: pb.SubmitBatch) -> None:
        result = pb.AdmissionResult()
        for submission in batch.submissions:
            assert submission.handle not in session.requests, "the handle is in use"
            self.submissions.append(submission)
            rejection = self.rejections.pop(0) if self.rejections else None
            if rejection is not None:
                rejection.handle, rejection.epoch = submission.handle, submission.epoch
                result.rejections.append(rejection)
                continue
            result.accepted_handles.append(submission.handle)
            session.requests[submission.handle] = FakeRequest(
                submission, max_model_len=self.max_model_len, now_s=asyncio.get_running_loop().time()
            )
        session.outbox.put_nowait(pb.AttachResponse(admission=result))

    # Steps.

    async def _step_for_ever(self) -> None:
        while True:
            await self._running.wait()
            await self._work.wait()
            self._work.clear()
            if self._running.is_set() and await self.step():
                self._work.set()
            await asyncio.sleep(self.step_interval_s)

    async def step(self) -> bool:
        """Makes one step for every frontend; returns whether it did anything."""
        did_something = False
        for session in self._sessions:
            step = self._step_of(session)
            if step is not None:
                did_something = True
                for message in self.rewrite_step(step):
                    if not self._stalled:
                        session.outbox.put_nowait(pb.AttachResponse(step=message))
        if did_something:
            self.num_steps += 1
            self._notify()
        return did_something

    def _step_of(self, session: _Session) -> pb.StepResult | None:
        if session.step_seq - session.acknowledged >= self.step_window:
            return None
        step = pb.StepResult(engine_step=self.num_steps + 1, load=self.load)
        for request in list(session.requests.values()):
            request.advance(step, self.tokens_per_step, asyncio.get_running_loop().time())
        for completion in step.completions:
            del session.requests[completion.handle]
        if not (step.handles or step.completions):
            return None
        session.step_seq += 1
        step.step_seq = session.step_seq
        return step

    # Words.

    async def _beat_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            self._broadcast(pb.AttachResponse(status=self._status()))

    def _broadcast(self, response: pb.AttachResponse) -> None:
        for session in self._sessions:
            if not self._stalled:
                session.outbox.put_nowait(response)

    def _status(self) -> pb.EngineStatus:
        self._num_turns += not self._frozen
        return pb.EngineStatus(
            state=self.state,
            engine_step=self.num_steps,
            loop_turns=self._num_turns,
            load=self.load,
            latency=self.latency,
            is_stalled=self.is_stalled,
            adapters=self._adapters() if self.changes_adapters else None,
        )

    def _info(self) -> pb.EngineInfo:
        return pb.EngineInfo(
            model="fake",
            weights_revision=self._weights_revision,
            tokenizer_sha256=self.sha256,
            max_model_len=self.max_model_len,
            block_size=16,
            num_kv_blocks=1024,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            vocab_size=self.vocab_size,
            end_token_ids=[END_TOKEN_ID],
            max_logprobs=20,
            engine_version="fake",
            adapters=self.adapters.values(),
            aliases=self._aliases,
        )

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def fake_adapter(name: str, path: str) -> pb.Adapter:
    """An adapter whose digest is that of its path."""
    return pb.Adapter(name=name, sha256=hashlib.sha256(path.encode()).digest(), path=path)


def rejection(reason: pb.RejectionReason, detail: str, *, retry_after_s: int | None = None) -> pb.Rejection:
    """A rejection for `FakeEngine.rejections`."""
    retry_after = None if retry_after_s is None else Duration(seconds=retry_after_s)
    return pb.Rejection(reason=reason, detail=detail, retry_after=retry_after)


def paused_engine(**options: Any) -> FakeEngine:
    """FakeEngine(**options) that makes only the steps it is told to."""
    engine = FakeEngine(**options)
    engine.pause()
    return engine
