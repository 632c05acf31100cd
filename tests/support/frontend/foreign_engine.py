"""ForeignEngine: serves the proto of vLLM, SGLang or TensorRT-LLM without a model, for tests; misbehaves on demand.

Each token of an answer is a function of all tokens before it (`next_token`), so that an answer continues in the same
way wherever and whenever it is continued from prompt and output.
"""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    trtllm_service_pb2,
    trtllm_service_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files

_LETTERS = range(64, 90)
_CHUNK_BYTES = 1 << 14


def next_token(token_ids: Sequence[int], *, may_end: bool) -> int:
    """The token after these; one in 40 ends the answer, where it may."""
    digest = hashlib.sha256(b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)).digest()
    if may_end and digest[0] < 6:
        return END_TOKEN_ID
    return _LETTERS[digest[1] % len(_LETTERS)]


def logprob(token_id: int) -> float:
    """The log-probability of a token, representable in 32 bits."""
    return -(token_id % 16) / 8 - 0.25


@dataclass
class Request:
    """What a Generate call asks for, in one form for all protos."""

    message: Any
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_end: bool
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass
class Answer:
    """The tokens that one message reports."""

    new_ids: list[int]
    all_ids: list[int]
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    is_first: bool = False


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
        unimplemented: calls that it does not have.
        info: fields of GetModelInfo to change.
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
    unimplemented: set[str] = field(default_factory=set)
    info: dict[str, Any] = field(default_factory=dict)
    loads: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
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
        speaker = {"vllm": _Vllm, "sglang": _Sglang, "trtllm": _Trtllm}[self.kind](self)
        speaker.register(self._server)
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


class _Speaker:
    """The service of one proto."""

    pb: Any
    lists_drawn_token = True  # among the alternatives, before the best ones

    def __init__(self, engine: ForeignEngine) -> None:
        self.engine = engine

    def register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def _check(self, name: str, context: Any) -> None:
        while self.engine.is_silent:
            await asyncio.sleep(0.01)
        if name in self.engine.unimplemented:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not implemented")

    async def _send(self, messages: list[Any], context: Any) -> None:
        for message in self.engine.rewrite(messages):
            await context.write(message)

    async def Generate(self, message: Any, context: Any) -> None:
        await self._check("Generate", context)
        async for answer in self.engine.answers(self.request(message), context):
            await self._send(self.messages(message, answer), context)

    def request(self, message: Any) -> Request:
        raise NotImplementedError

    def messages(self, message: Any, answer: Answer) -> list[Any]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Fields of GetModelInfoResponse; these are of vLLM and SGLang."""
        return {
            "served_model_name": "fake",
            "is_generation": True,
            "max_context_length": self.engine.max_model_len,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [END_TOKEN_ID],
        }

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        await self._check("GetModelInfo", context)
        return self.pb.GetModelInfoResponse(**self.facts() | self.engine.info)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        await self._check("HealthCheck", context)
        return self.pb.HealthCheckResponse(healthy=not self.engine.problem, message=self.engine.problem)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._check("GetTokenizer", context)
        archive = self.engine.archive()
        sha256 = self.engine.sha256 or hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), _CHUNK_BYTES):
            data = archive[start : start + _CHUNK_BYTES]
            is_last = start + _CHUNK_BYTES >= len(archive)
            yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256 if is_last else "")

    async def Abort(self, request: Any, context: Any) -> Any:
        ids = [request.request_id] if hasattr(request, "request_id") else list(request.request_ids)
        self.engine.aborted += ids
        self.engine.notify()
        return self.pb.AbortResponse()

    async def Embed(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no embeddings")

    async def GetLoads(self, request: Any, context: Any) -> Any:
        await self._check("GetLoads", context)
        load = {"num_running_reqs": self.engine.num_open, "max_total_num_tokens": 65536, **self.engine.loads}
        return self.pb.GetLoadsResponse(version="1.2.3", dp_rank_count=1, loads=[self.pb.SchedulerLoad(**load)])

    def _logprob_columns(self, token_ids: Sequence[int], num_top: int | None) -> Any:
        """As the servicers send them: the drawn token first, then the best, cut at the number asked for."""
        if num_top is None:
            return None
        columns = self.pb.OutputLogProbs(token_ids=token_ids, token_logprobs=[logprob(one) for one in token_ids])
        for token_id in token_ids if num_top else ():
            ids = self._tops(token_id, num_top)
            columns.top_logprobs.add(token_ids=ids, values=[logprob(one) for one in ids])
        return columns

    def _tops(self, token_id: int, num_top: int) -> list[int]:
        drawn = [token_id] if self.lists_drawn_token else []
        return list(dict.fromkeys([*drawn, *range(num_top)]))[:num_top]

    def _prompt_columns(self, token_ids: Sequence[int], num_top: int | None) -> Any:
        if num_top is None:
            return None
        columns = self.pb.InputLogProbs(token_ids=token_ids)
        for position, token_id in enumerate(token_ids):
            entry = columns.token_logprobs.add()
            if position:
                entry.value = logprob(token_id)
            if num_top:
                ids = self._tops(token_id, num_top) if position else []
                columns.top_logprobs.add(token_ids=ids, values=[logprob(one) for one in ids])
        return columns

    def _column_messages(self, answer: Answer, request: Request, *, counts_all: bool, **names: Any) -> list[Any]:
        """A chunk, and Complete with the last one; vLLM counts new tokens, SGLang all."""
        pb = self.pb
        chunk = pb.GenerateStreamChunk(
            token_ids=answer.new_ids,
            prompt_tokens=answer.num_prompt_tokens,
            completion_tokens=len(answer.all_ids if counts_all else answer.new_ids),
            output_logprobs=self._logprob_columns(answer.new_ids, request.num_logprobs),
            input_logprobs=(
                self._prompt_columns(request.prompt_ids, request.prompt_logprobs) if answer.is_first else None
            ),
        )
        messages = [pb.GenerateResponse(chunk=chunk, **names)]
        if answer.finish_reason:
            complete = pb.GenerateComplete(
                output_ids=answer.all_ids if counts_all else answer.new_ids,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.num_prompt_tokens,
                completion_tokens=len(answer.all_ids if counts_all else answer.new_ids),
            )
            if answer.finish_reason == "stop" and answer.all_ids[-1] in request.stop_token_ids:
                complete.matched_token_id = answer.all_ids[-1]
            messages.append(pb.GenerateResponse(complete=complete, **names))
        return messages


class _Vllm(_Speaker):
    pb = vllm_engine_pb2

    def register(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    def request(self, message: Any) -> Request:
        params = message.sampling_params
        return Request(
            message,
            message.request_id,
            list(message.tokenized.input_ids),
            params.max_tokens,
            params.min_tokens,
            list(params.stop_token_ids),
            params.ignore_eos,
            params.logprobs if params.HasField("logprobs") else None,
            params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        )

    def messages(self, message: Any, answer: Answer) -> list[Any]:
        return self._column_messages(answer, self.request(message), counts_all=False)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return self.pb.GetServerInfoResponse(server_type="vllm-grpc", block_size=32, max_num_seqs=64)

    FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _Speaker.Embed


class _Sglang(_Speaker):
    pb = sglang_scheduler_pb2
    lists_drawn_token = False

    def register(self, server: grpc.aio.Server) -> None:
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(self, server)

    def request(self, message: Any) -> Request:
        params = message.sampling_params
        return Request(
            message,
            message.request_id,
            list(message.tokenized.input_ids),
            params.max_new_tokens,
            params.min_new_tokens,
            list(params.stop_token_ids),
            params.ignore_eos,
            message.top_logprobs_num if message.return_logprob else None,
            message.top_logprobs_num if message.return_logprob and message.logprob_start_len == 0 else None,
        )

    def messages(self, message: Any, answer: Answer) -> list[Any]:
        return self._column_messages(answer, self.request(message), counts_all=True, request_id=message.request_id)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"weight_version": "default"}

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return self.pb.GetServerInfoResponse(sglang_version="0.5", max_total_num_tokens=65536)

    FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _Speaker.Embed
    LoadLoRAAdapter = UnloadLoRAAdapter = ListLoadedLoRAAdapters = _Speaker.Embed


class _Trtllm(_Speaker):
    pb = trtllm_service_pb2

    def register(self, server: grpc.aio.Server) -> None:
        trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server(self, server)

    def request(self, message: Any) -> Request:
        return Request(
            message,
            message.request_id,
            list(message.tokenized.input_token_ids),
            message.max_tokens,
            message.sampling_config.min_tokens,
            list(message.stop_token_ids),
            message.ignore_eos,
            message.output_config.logprobs if message.output_config.HasField("logprobs") else None,
        )

    def messages(self, message: Any, answer: Answer) -> list[Any]:
        request, pb = self.request(message), self.pb
        chunk = pb.GenerateStreamChunk(
            token_ids=answer.new_ids,
            prompt_tokens=answer.num_prompt_tokens,
            completion_tokens=len(answer.all_ids),
            logprobs=[self._entry(one, request.num_logprobs) for one in answer.new_ids if request.num_logprobs],
        )
        messages = [pb.GenerateResponse(request_id=message.request_id, chunk=chunk)]
        if answer.finish_reason:
            complete = pb.GenerateComplete(
                output_token_ids=answer.all_ids,
                finish_reason=answer.finish_reason,
                prompt_tokens=answer.num_prompt_tokens,
                completion_tokens=len(answer.all_ids),
            )
            messages.append(pb.GenerateResponse(request_id=message.request_id, complete=complete))
        return messages

    def _entry(self, token_id: int, num_top: int | None) -> Any:
        tops = [self.pb.TopLogprob(token_id=one, logprob=logprob(one)) for one in range(num_top or 0)]
        return self.pb.TokenLogprob(token_id=token_id, logprob=logprob(token_id), top_logprobs=tops)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        await self._check("HealthCheck", context)
        return self.pb.HealthCheckResponse(status=self.engine.problem or "OK")

    def facts(self) -> dict[str, Any]:
        return {"model_id": "fake", "max_seq_len": self.engine.max_model_len, "vocab_size": VOCAB_SIZE}

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return self.pb.GetServerInfoResponse(version="1.2", backend="pytorch")

    SubscribeKvEvents = _Speaker.Embed


def answer_to(
    prompt_ids: Sequence[int], max_tokens: int, *, ignore_end: bool = False, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """The tokens that an undisturbed engine generates."""
    token_ids = list(prompt_ids)
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(next_token(token_ids, may_end=not ignore_end))
        token_ids.append(answer[-1])
        if answer[-1] == END_TOKEN_ID or answer[-1] in stop_token_ids:
            break
    return answer
