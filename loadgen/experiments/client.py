"""A client on the generated stubs: requests with token ids out, every token's arrival in.

Deliberately thin: what it costs is part of what is measured, and every client pays at least this.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from engine.bench.serve import Run

_OPTIONS = (("grpc.max_receive_message_length", 16 << 20), ("grpc.enable_http_proxy", 0))
_CALL_TIMEOUT_S = 1800.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a client got.

    Attributes:
        run: answers, and when every token of them had arrived.
        num_messages: messages with tokens, of all requests.
        started_s: when the first request was sent, `time.monotonic`.
    """

    run: Run
    num_messages: int
    started_s: float


class Client:
    """One channel on an event loop that rests between calls. Use it in a `with` block.

    Args:
        target: address of the frontend.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._runner = asyncio.Runner()
        self._channel: grpc.aio.Channel | None = None

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._channel is not None
        self._runner.run(self._channel.close())
        self._runner.close()

    def is_served(self) -> bool:
        """Whether requests are taken; waits a moment if they are not."""
        return self._runner.run(self._is_served())

    def generate(self, workload: Workload) -> Delivery:
        """Greedy answers, all requested at once, each to its full length.

        Raises: BenchmarkError: a call failed.
        """
        requests = [_request(p, limit) for p, limit in zip(workload.prompts, workload.max_tokens, strict=True)]
        return self._runner.run(self._generate(requests))

    async def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        self._stub = GenerationServiceStub(self._channel)

    async def _is_served(self) -> bool:
        try:
            await self._stub.GetModel(pb.GetModelRequest(), timeout=1.0)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(_POLL_S)
            return False
        return True

    async def _generate(self, requests: Sequence[pb.StreamGenerateRequest]) -> Delivery:
        started_s = time.monotonic()
        answers = await asyncio.gather(*(self._answer(request, started_s) for request in requests))
        wall_s = time.monotonic() - started_s
        output_ids, token_times_s, num_messages = zip(*answers, strict=True)
        run = Run(output_ids, token_times_s, arrivals_s=(0.0,) * len(requests), steps=(), wall_s=wall_s)
        return Delivery(run, sum(num_messages), started_s)

    async def _answer(
        self, request: pb.StreamGenerateRequest, started_s: float
    ) -> tuple[tuple[int, ...], tuple[float, ...], int]:
        ids: list[int] = []
        times_s: list[float] = []
        num_messages = 0
        responses: AsyncIterator[pb.StreamGenerateResponse] = aiter(
            self._stub.StreamGenerate(request, timeout=_CALL_TIMEOUT_S)
        )
        try:
            async for response in responses:
                new_ids = response.chunk.token_ids
                if new_ids:
                    ids += new_ids
                    times_s += [time.monotonic() - started_s] * len(new_ids)
                    num_messages += 1
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"a call failed: {error.code().name}: {error.details()}") from error
        return tuple(ids), tuple(times_s), num_messages


def _request(prompt: Sequence[int], max_tokens: int) -> pb.StreamGenerateRequest:
    """With text, as clients want it, and with the ids beside it, to be checked."""
    return pb.StreamGenerateRequest(
        spec=pb.GenerationSpec(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingOptions(temperature=0.0),
            stop=pb.StopOptions(max_tokens=max_tokens, ignore_end_token=True),
            output=pb.OutputOptions(token_ids=True),
        )
    )
