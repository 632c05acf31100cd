"""The engine asked without a gateway, over vLLM's API: what a gateway's time to the first token is compared with."""

import itertools
import time
from types import TracebackType
from typing import Self

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc

from loadgen.experiments.gateways.streams import Stream


class DirectClient:
    """A gRPC client of an engine.

    Args:
        port: of the engine, on 127.0.0.1.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._request_ids = itertools.count(1)

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}")
        self._stub = vllm_grpc.VllmEngineStub(self._channel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        await self._channel.close()

    async def stream(self, prompt: str, max_tokens: int) -> Stream:
        """Streams one answer; a character of the prompt is a token of the null engine."""
        request = vllm_pb.GenerateRequest(
            request_id=str(next(self._request_ids)),
            tokenized=vllm_pb.TokenizedInput(input_ids=[ord(char) - ord("!") for char in prompt]),
            sampling_params=vllm_pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            stream=True,
        )
        began_s, ttft_s, num_tokens = time.perf_counter(), 0.0, 0
        async for response in self._stub.Generate(request):
            ttft_s = ttft_s or time.perf_counter() - began_s
            num_tokens += len(response.chunk.token_ids)
        return Stream(ttft_s, num_tokens)
