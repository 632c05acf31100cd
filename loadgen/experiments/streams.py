"""Streams that go on side by side, with every token and the time of every message."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import grpc
import grpc.aio

from chairlift.bench.benchmark import BenchmarkError
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub

_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_TIMEOUT_S = 300.0


class Stream(NamedTuple):
    """What one client saw.

    Attributes:
        token_ids: of the answer.
        times_s: when each message with tokens came, time.monotonic().
        moved_s: what the answer's own account says was lost with an engine.
    """

    token_ids: tuple[int, ...]
    times_s: tuple[float, ...]
    moved_s: float

    @property
    def gaps_s(self) -> list[float]:
        """From each message to the next."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]


async def play(
    target: str, prompts: Sequence[str], *, num_tokens: int, on_progress: Callable[[int], None]
) -> list[Stream]:
    """Asks for all at once, over one connection each.

    Args:
        target: the frontend's gRPC port, HOST:PORT.
        prompts: one for each stream, which is sampled under its index as its seed.
        num_tokens: of each answer.
        on_progress: told how many tokens every stream has at least, whenever that grows.

    Raises: BenchmarkError: a call failed.
    """
    counts = [0] * len(prompts)
    least = 0

    def count(index: int, num_new: int) -> None:
        nonlocal least
        counts[index] += num_new
        if (now_least := min(counts)) > least:
            least = now_least
            on_progress(least)

    asks = [_play_one(target, index, prompt, num_tokens, count) for index, prompt in enumerate(prompts)]
    return await asyncio.gather(*asks)


async def _play_one(target: str, index: int, prompt: str, num_tokens: int, count: Callable[[int, int], None]) -> Stream:
    request = pb.StreamGenerateRequest(
        spec=pb.GenerationSpec(
            text=prompt,
            sampling=pb.SamplingOptions(temperature=1.0, seed=index),
            stop=pb.StopOptions(max_tokens=num_tokens, ignore_end_token=True),
            output=pb.OutputOptions(token_ids=True),
        )
    )
    token_ids: list[int] = []
    times_s: list[float] = []
    moved_s = 0.0
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        try:
            async for message in GenerationServiceStub(channel).StreamGenerate(request, timeout=_TIMEOUT_S):
                if message.HasField("chunk") and message.chunk.num_tokens:
                    times_s.append(time.monotonic())
                    if message.chunk.first_token_index != len(token_ids):
                        raise BenchmarkError(f"token {message.chunk.first_token_index} came after {len(token_ids)}")
                    token_ids += message.chunk.token_ids
                    count(index, message.chunk.num_tokens)
                elif message.HasField("finished"):
                    moved_s = message.finished.timing.moved.ToMicroseconds() / 1e6
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"stream {index} failed: {error.code().name}: {error.details()}") from error
    return Stream(tuple(token_ids), tuple(times_s), moved_s)
