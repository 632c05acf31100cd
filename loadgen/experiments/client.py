"""Thin clients of the frontend's gRPC and HTTP endpoints: tokens and their arrival times.

They are thin on purpose: the client shares the machine's cores with the server, so its cost is part of the measurement.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import grpc
import grpc.aio

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.experiments.pair import Pair

if TYPE_CHECKING:
    from chairlift.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub

OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # a connection per channel
    ("grpc.enable_http_proxy", 0),
)
_TIMEOUT_S = 1800.0
_EVENT, _DONE = b"data: ", b"data: [DONE]"


class Stream(NamedTuple):
    """One streamed answer.

    Attributes:
        started_s: when the request was sent, `time.monotonic`.
        times_s: arrival of each message with tokens, same clock.
        counts: tokens of each of these messages.
        token_ids: of the answer; empty where none were requested.
        moved_s: time lost to engines that failed, from the answer's own timing.
    """

    started_s: float
    times_s: tuple[float, ...]
    counts: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    moved_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(self.counts)

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.times_s[0] - self.started_s

    @property
    def intervals_s(self) -> list[float]:
        """Seconds from each message to the next."""
        return [later - earlier for earlier, later in pairwise(self.times_s)]


def greedy_spec(prompt: Sequence[int] | str, num_tokens: int, *, text: bool = True) -> pb.GenerationSpec:
    """A greedy request of exactly this many tokens; token ids are requested for a prompt of ids.

    Args:
        prompt: token ids or text.
        num_tokens: length of the answer.
        text: whether to ask for text.
    """
    spec = pb.GenerationSpec(
        sampling=pb.SamplingOptions(temperature=0.0),
        stop=pb.StopOptions(max_tokens=num_tokens, ignore_end_token=True),
    )
    if isinstance(prompt, str):
        spec.text = prompt
    else:
        spec.token_ids.ids.extend(prompt)
        spec.output.token_ids = True
        spec.output.text = text
    return spec


async def stream_grpc(
    stub: "GenerationServiceAsyncStub", spec: pb.GenerationSpec, on_tokens: Callable[[int], None] | None = None
) -> Stream:
    """Streams one answer over gRPC.

    Args:
        stub: of a channel.
        spec: the request.
        on_tokens: called with the number of tokens of every message.
    Raises: BenchmarkError: the call failed, or tokens came out of order.
    """
    times_s: list[float] = []
    counts: list[int] = []
    token_ids: list[int] = []
    num_tokens, moved_s = 0, 0.0
    started_s = time.monotonic()
    try:
        async for message in stub.StreamGenerate(pb.StreamGenerateRequest(spec=spec), timeout=_TIMEOUT_S):
            chunk = message.chunk
            if count := chunk.num_tokens:
                times_s.append(time.monotonic())
                if chunk.first_token_index != num_tokens:
                    raise BenchmarkError(f"token {chunk.first_token_index} came after {num_tokens}")
                num_tokens += count
                counts.append(count)
                token_ids += chunk.token_ids
                if on_tokens is not None:
                    on_tokens(count)
            elif message.HasField("finished"):
                moved_s = message.finished.timing.moved.ToMicroseconds() / 1e6
    except grpc.aio.AioRpcError as error:
        raise BenchmarkError(f"a call failed: {error.code().name}: {error.details()}") from error
    return Stream(started_s, tuple(times_s), tuple(counts), tuple(token_ids), moved_s)


async def ask_grpc(port: int, num_tokens: int) -> Stream:
    """Streams one answer's text over a gRPC connection of its own; raises BenchmarkError if the call fails."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        return await stream_grpc(GenerationServiceStub(channel), greedy_spec("prompt", num_tokens))


async def ask_http(port: int, num_tokens: int) -> Stream:
    """Streams one answer over a bare HTTP connection, where every token is one character of text.

    Raises: BenchmarkError: there is no answer.
    """
    body = json.dumps(
        {"prompt": "prompt", "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started_s = time.monotonic()
    writer.write(head.encode() + body)
    times_s: list[float] = []
    counts: list[int] = []
    first_line = b""
    async for line in reader:
        first_line = first_line or line
        if not line.startswith(_EVENT) or line.startswith(_DONE):
            continue
        if text := json.loads(line[len(_EVENT) :])["choices"][0]["text"]:
            times_s.append(time.monotonic())
            counts.append(len(text))
    writer.close()
    if not counts:
        raise BenchmarkError(f"a call failed: {first_line.decode().strip()}")
    return Stream(started_s, tuple(times_s), tuple(counts))


class Cost(NamedTuple):
    """CPU microseconds per delivered token of each process, tokens per message, and tokens per second."""

    cpu_us: dict[str, float]
    tokens_per_message: float
    tokens_per_s: float


def delivered(
    name: str, deliver: Callable[[], Sequence[Stream]], num_tokens: int, clocks: Mapping[str, Callable[[], float]]
) -> tuple[Sequence[Stream], Cost]:
    """Delivers streams and returns them with their cost.

    Args:
        name: in the error.
        deliver: runs them.
        num_tokens: that have to arrive.
        clocks: CPU seconds so far, by process.
    Raises: BenchmarkError: another number of tokens arrived.
    """
    before_s = {process: clock() for process, clock in clocks.items()}
    started_s = time.monotonic()
    streams = deliver()
    wall_s = time.monotonic() - started_s
    arrived = sum(stream.num_tokens for stream in streams)
    if arrived != num_tokens:
        raise BenchmarkError(f"{name}: {arrived} tokens of {num_tokens} arrived")
    cpu_us = {process: 1e6 * (clock() - before_s[process]) / num_tokens for process, clock in clocks.items()}
    return streams, Cost(cpu_us, num_tokens / sum(len(stream.counts) for stream in streams), num_tokens / wall_s)


class Client:
    """One gRPC channel on an event loop that is idle between calls. Use it in a `with` block.

    Args:
        address: gRPC endpoint of a frontend.
        pids: of the server's processes, see `System.pids`.
    """

    def __init__(self, address: str, pids: frozenset[int] = frozenset()) -> None:
        self.pids = pids
        self._address = address
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()

    def streams(self, workload: Workload) -> list[Stream]:
        """Greedy answers with ids and text, all requested at once, each of its full length.

        Raises: BenchmarkError: a call failed.
        """
        specs = [greedy_spec(p, limit) for p, limit in zip(workload.prompts, workload.max_tokens, strict=True)]
        return self._runner.run(self._stream_all(specs))

    def generate(self, workload: Workload) -> Run:
        """See `System.generate`."""
        begin_s = time.monotonic()
        streams = self.streams(workload)
        wall_s = time.monotonic() - begin_s
        return Run(
            output_ids=tuple(stream.token_ids for stream in streams),
            token_times_s=tuple(
                tuple(
                    at_s - begin_s
                    for at_s, count in zip(stream.times_s, stream.counts, strict=True)
                    for _ in range(count)
                )
                for stream in streams
            ),
            arrivals_s=(0.0,) * len(streams),
            steps=(),
            wall_s=wall_s,
        )

    async def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._address, options=OPTIONS)
        self._stub = GenerationServiceStub(self._channel)

    async def _stream_all(self, specs: Sequence[pb.GenerationSpec]) -> list[Stream]:
        return await asyncio.gather(*(stream_grpc(self._stub, spec) for spec in specs))


@contextmanager
def served_pair(engine_flags: Sequence[str], folder: Path) -> Iterator[Client]:
    """A pair with a connected client, as one system under test; see `Pair` for arguments and errors."""
    with Pair(engine_flags, folder) as pair:
        pair.wait_until_served()
        with Client(pair.address, pair.pids) as client:
            yield client
