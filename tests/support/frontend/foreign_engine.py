"""ForeignEngine: serves the proto of vLLM, SGLang or TensorRT-LLM without a model, for tests; misbehaves on demand."""

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from chairlift.service.health import Health, add_health
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files
from tests.support.frontend.foreign_answers import Answer, Request, next_token
from tests.support.frontend.foreign_speakers import SglangSpeaker, TrtllmSpeaker, VllmSpeaker


@dataclass(eq=False)
class ForeignEngine:
    """An engine of another project.

    Args:
        kind: scheme of its address.
        address: HOST:PORT, port 0 takes a free one.
        step_interval_s: pause after each message.
        files: in the tokenizer's archive; None: the byte tokenizer's.

    Attributes:
        requests: every Generate call, in order.
        rewrite: changes the messages of one step before they are sent.
        error: ends the next Generate calls: number of tokens before, status, details.
        num_cut: messages after which streams end without a word; None: never.
        problem: what its health check reports.
        health: its grpc.health.v1; None: it has none.
        unimplemented: calls that it does not have.
        info: fields of GetModelInfo to change.
        cache_events: batches for those that follow its prefix cache, None ends their streams; unset: it has none.
        num_subscriptions: streams of these so far.
        ended: ids of calls that were cancelled, and of requests that were aborted.
    """

    kind: str = "vllm"
    address: str = "127.0.0.1:0"
    step_interval_s: float = 0.0
    tokens_per_chunk: int = 1
    max_model_len: int = 4096
    files: Mapping[str, bytes] | None = None
    requests: list[Request] = field(default_factory=list)
    rewrite: Callable[[list[Any]], list[Any]] = list
    error: tuple[int, grpc.StatusCode, str] | None = None
    num_cut: int | None = None
    problem: str = ""
    health: Health | None = None
    unimplemented: set[str] = field(default_factory=set)
    info: dict[str, Any] = field(default_factory=dict)
    loads: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cache_events: "asyncio.Queue[Any] | None" = None
    num_subscriptions: int = 0
    num_open: int = 0
    num_messages: int = 0

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self.is_silent = False

    # Life, as that of FakeEngine.

    async def start(self) -> str:
        """Opens the port; returns the address to attach to."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        speaker = {"vllm": VllmSpeaker, "sglang": SglangSpeaker, "trtllm": TrtllmSpeaker}[self.kind](self)
        speaker.register(self._server)
        if self.health is not None:
            add_health(self.health, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._server.start()
        return f"{self.kind}://{self.address}"

    async def kill(self) -> None:
        """Goes away without a word."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def pause(self) -> None:
        """Sends no messages; `resume` goes on."""
        self._running.clear()

    def resume(self) -> None:
        """Sends again."""
        self._running.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on this engine holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def notify(self) -> None:
        """Something has changed."""
        self._changed.set()

    def archive(self) -> bytes:
        """The tokenizer's archive."""
        bundle = io.BytesIO()
        with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in (byte_tokenizer_files() if self.files is None else self.files).items():
                archive.writestr(name, data)
        return bundle.getvalue()

    async def answers(self, request: Request, context: Any) -> AsyncIterator[Answer]:
        """Yields the parts of an answer."""
        self.requests.append(request)
        self.num_open += 1
        self.notify()
        token_ids = list(request.prompt_ids)
        all_ids: list[int] = []
        is_first = True
        try:
            while True:
                await self._running.wait()
                if self.error is not None and len(all_ids) >= self.error[0]:
                    await context.abort(*self.error[1:])
                new_ids: list[int] = []
                reason = ""
                while len(new_ids) < self.tokens_per_chunk and not reason:
                    may_end = not request.ignore_end and len(all_ids) + 1 > request.min_tokens
                    token_id = next_token(token_ids, may_end=may_end)
                    for ids in (token_ids, all_ids, new_ids):
                        ids.append(token_id)
                    if token_id == END_TOKEN_ID or (token_id in request.stop_token_ids and may_end):
                        reason = "stop"
                    elif len(all_ids) >= request.max_tokens or len(token_ids) >= self.max_model_len:
                        reason = "length"
                yield Answer(new_ids, list(all_ids), reason, len(request.prompt_ids), is_first)
                is_first = False
                self.num_messages += 1
                self.notify()
                if reason or (self.num_cut is not None and self.num_messages >= self.num_cut):
                    return
                await asyncio.sleep(self.step_interval_s)
        finally:
            self.num_open -= 1
            self.ended.append(request.request_id)
            self.notify()
