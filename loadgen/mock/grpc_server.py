"""A mock of our gRPC API, chairlift.v1.GenerationService."""

import contextlib
import socket
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb
from loadgen.mock.engine import MockFailureError, MockServer

_SERVICE = "chairlift.v1.GenerationService"
_MAX_MESSAGE_BYTES = 64 << 20


class MockGrpcServer(MockServer):
    """A mock server of Chairlift's gRPC API."""

    async def start(self) -> None:
        """See MockServer."""
        options = [
            ("grpc.so_reuseport", int(self._shares_port)),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ]
        self._server = grpc.aio.server(options=options)
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "StreamGenerate": grpc.unary_stream_rpc_method_handler(self._stream_generate),
            "GetModel": grpc.unary_unary_rpc_method_handler(self._get_model),
            "CountTokens": grpc.unary_unary_rpc_method_handler(self._count_tokens),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self._check_free()
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        await self._server.start()
        self.url = f"grpc://{self._host}:{port}"

    def _check_free(self) -> None:
        """Binds once by ourselves: of a port that is taken gRPC writes to stderr, and does not say why in its error."""
        found = socket.getaddrinfo(self._host.strip("[]"), self._port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        socket.create_server(address, family=family, reuse_port=self._shares_port).close()

    async def close(self) -> None:
        """See MockServer."""
        await self._server.stop(None)

    async def _stream_generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        spec = pb.StreamGenerateRequest.FromString(request).spec
        behaviour = self._engine.behaviour
        if spec.model not in ("", behaviour.model):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {spec.model!r}, this is {behaviour.model!r}")
        if spec.WhichOneof("prompt") == "token_ids":
            prompt = np.array(spec.token_ids.ids, dtype="<u4").tobytes()
            num_input_tokens = len(spec.token_ids.ids)
        else:
            prompt = spec.text.encode()
            num_input_tokens = behaviour.num_text_tokens(spec.text)
        num_cached = self._engine.num_cached(num_input_tokens)
        messages = self._engine.answer(prompt, num_input_tokens, spec.stop.max_tokens)
        num_tokens = 0
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    if not num_tokens:
                        yield _started(behaviour.model, num_input_tokens, num_cached)
                    num_tokens += message.num_tokens
                    yield _chunk(message.first, message.num_tokens)
        except MockFailureError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        yield _finished(num_input_tokens, num_cached, num_tokens, behaviour.ttft_s)

    async def _get_model(self, request: bytes, context: Any) -> bytes:
        wanted, behaviour = pb.GetModelRequest.FromString(request).model, self._engine.behaviour
        if wanted not in ("", behaviour.model):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {wanted!r}, this is {behaviour.model!r}")
        return pb.GetModelResponse(
            model=behaviour.model,
            weights_revision="mock",
            max_model_len=behaviour.max_model_len,
            vocab_size=behaviour.vocab_size,
            end_token_ids=[behaviour.vocab_size - 1],
        ).SerializeToString()

    async def _count_tokens(self, request: bytes, context: Any) -> bytes:  # noqa: ARG002 - the signature is gRPC's
        text = pb.CountTokensRequest.FromString(request).text
        return pb.CountTokensResponse(num_tokens=self._engine.behaviour.num_text_tokens(text)).SerializeToString()


@lru_cache(maxsize=1 << 14)
def _chunk(first: int, num_tokens: int) -> bytes:
    chunk = pb.Chunk(first_token_index=first, num_tokens=num_tokens, text=" mock" * num_tokens)
    return pb.StreamGenerateResponse(chunk=chunk).SerializeToString()


def _started(model: str, num_input_tokens: int, num_cached: int) -> bytes:
    started = pb.Started(model=model, num_prompt_tokens=num_input_tokens, num_cached_tokens=num_cached)
    return pb.StreamGenerateResponse(started=started).SerializeToString()


def _finished(num_input_tokens: int, num_cached: int, num_tokens: int, ttft_s: float) -> bytes:
    finished = pb.Finished(
        reason=pb.FINISH_REASON_MAX_TOKENS,
        usage=pb.Usage(num_prompt_tokens=num_input_tokens, num_cached_tokens=num_cached, num_output_tokens=num_tokens),
        timing=pb.Timing(queued=Duration(), prefill=Duration(nanos=round(ttft_s * 1e9) % 1_000_000_000)),
    )
    return pb.StreamGenerateResponse(finished=finished).SerializeToString()
