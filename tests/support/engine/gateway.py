"""A client of an engine's vLLM API, for tests."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc


class Gateway:
    """A client of an engine's vLLM API.

    Attributes:
        stub: its methods.
        channel: to the engine, for other services.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = vllm_grpc.VllmEngineStub(channel)

    async def generate(self, request: Any, timeout_s: float | None = None) -> list[Any]:
        """Returns all responses of a call."""
        return [response async for response in self.stub.Generate(request, timeout=timeout_s)]


def wanted(prompt_ids: Sequence[int] = (5, 6, 7), *, request_id: str = "r", stream: bool = True, **params: Any) -> Any:
    """A greedy request with seed 0."""
    params = {"temperature": 0.0, "seed": 0, "max_tokens": 8, **params}
    return vllm_pb.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_pb.TokenizedInput(input_ids=prompt_ids),
        sampling_params=vllm_pb.SamplingParams(**{name: value for name, value in params.items() if value is not None}),
        stream=stream,
    )


def tokens_of(responses: Sequence[Any], index: int = 0) -> list[int]:
    """The tokens of an answer's chunks; checks its counts and that its last response repeats them."""
    chunks = [response.chunk for response in responses if response.HasField("chunk") and response.chunk.index == index]
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    (complete,) = [each.complete for each in responses if each.HasField("complete") and each.complete.index == index]
    assert list(complete.output_ids) == token_ids
    assert complete.completion_tokens == len(token_ids)
    return token_ids
