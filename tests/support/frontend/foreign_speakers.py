"""The gRPC services of vLLM, SGLang and TensorRT-LLM, as `ForeignEngine` serves them."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

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

from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE
from tests.support.frontend.foreign_answers import Answer, Request, logprob

if TYPE_CHECKING:
    from tests.support.frontend.foreign_engine import ForeignEngine

_CHUNK_BYTES = 1 << 14


class Speaker:
    """The service of one proto."""

    pb: Any
    lists_drawn_token = True  # among the alternatives, before the best ones

    def __init__(self, engine: "ForeignEngine") -> None:
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

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.engine.num_subscriptions and self.engine.cache_events is not None:
            self.engine.cache_events = asyncio.Queue()  # the stream before may still wait at the other one
        events = self.engine.cache_events
        self.engine.num_subscriptions += 1
        self.engine.notify()
        if events is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no events")
            return
        while (batch := await events.get()) is not None:
            yield batch

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


class VllmSpeaker(Speaker):
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

    FlushCache = StartProfile = StopProfile = Speaker.Embed


class SglangSpeaker(Speaker):
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

    FlushCache = StartProfile = StopProfile = Speaker.Embed
    LoadLoRAAdapter = UnloadLoRAAdapter = ListLoadedLoRAAdapters = Speaker.Embed


class TrtllmSpeaker(Speaker):
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
