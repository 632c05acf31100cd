"""Runs of the load generator in virtual time: no time passes, and the time of every event is an exact number."""

import asyncio
import contextlib
import selectors
import tempfile
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest
from aiohttp import web

from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.engine import MockRecord, MockServer
from loadgen.mock.grpc_server import MockGrpcServer
from loadgen.mock.http_server import MockHttpServer
from loadgen.record import CHUNK, RunData, new_requests
from loadgen.run.options import RunOptions
from loadgen.run.pacing import Pacer
from loadgen.run.preparer import Preparer
from loadgen.run.recorder import Recorder
from loadgen.run.sender import Sender
from loadgen.run.shards import make_shards
from loadgen.run.shared_arrays import PROGRESS
from loadgen.target.base import Api, PlannedRequest, Target, TargetSpec
from loadgen.target.chairlift_grpc import ChairliftTarget
from loadgen.target.openai import OpenAiTarget
from loadgen.trace.schema import Trace

START_NS = 7_000_000_000
_ROUND_S = 1e-4  # what the pacer's look at the clock takes here; it divides all times of these runs


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when nothing is left to do: at once to the next timer.

    Attributes:
        now_ns: the clock.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        """Returns the clock in seconds, for asyncio's timers."""
        return self.now_ns / 1e9


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if timeout is None and not events:
            raise AssertionError("nothing is left that could happen")
        if timeout and not events:
            self._loop.now_ns += max(1, round(timeout * 1e9))
        return events


@contextlib.contextmanager
def virtual_mock_time() -> Iterator[tuple[asyncio.Runner, VirtualLoop]]:
    """Yields a runner and its event loop, on whose clock mock servers answer."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.mock.engine.time", SimpleNamespace(monotonic_ns=lambda: loop.now_ns))
        patch.setattr("loadgen.mock.engine._TIMER_BIAS_S", 0.0)
        yield runner, loop


def run_in_virtual_time(
    api: Api, behaviour: MockBehaviour, workload: Trace, max_concurrency: int | None = None
) -> tuple[RunData, MockRecord]:
    """Runs a workload against a mock server, both on one event loop in virtual time. Messages take no time to arrive.

    HTTP goes through Unix sockets, where what is written can be read at once. gRPC has threads of its own, which know
    nothing of virtual time: its calls go straight to the server's handler.

    Returns: the run, and what the server saw.
    """
    options = RunOptions(max_concurrency=max_concurrency)
    with virtual_mock_time() as (runner, loop):
        return runner.run(_run(loop, api, behaviour, workload, options))


async def _run(
    loop: VirtualLoop, api: Api, behaviour: MockBehaviour, workload: Trace, options: RunOptions
) -> tuple[RunData, MockRecord]:
    async with (_grpc if api == "grpc" else _http)(behaviour) as (target, server):
        requests, progress = new_requests(len(workload)), np.zeros(1, dtype=PROGRESS)
        requests["scheduled_ns"] = np.round(workload.arrival_s * 1e9)
        chunks = np.zeros(int(workload.output_tokens.sum()), dtype=CHUNK)
        errors: list[str] = []
        recorder = Recorder(requests, chunks, progress, errors.append, lambda: loop.now_ns)
        (shard,) = make_shards(workload, options, num_workers=1)

        def prepare(index: int) -> Any:
            ids = np.arange(workload.input_tokens[index], dtype=np.uint32)
            return target.prepare(PlannedRequest(index, ids, None, int(workload.output_tokens[index])))

        preparer = Preparer(shard.order, prepare, workload.input_tokens.tolist(), budget=1 << 30)
        preparer.fill()
        pacer = Pacer(lambda: loop.now_ns, lambda delay_s: asyncio.sleep(delay_s or _ROUND_S))
        await Sender(target, preparer, recorder, shard, pacer).run(START_NS)
    assert not progress["chunks_lost"].any()
    noted = chunks[: int(progress["num_chunks"][0])]
    ended_s = float(requests["ended_ns"].max()) / 1e9
    return RunData(workload, requests, noted, tuple(errors), (), ended_s), server.record


@contextlib.asynccontextmanager
async def _grpc(behaviour: MockBehaviour) -> AsyncIterator[tuple[Target, MockServer]]:
    server = MockGrpcServer(behaviour)
    with _direct_calls(server):
        target = ChairliftTarget(TargetSpec("grpc://mock"), probe_timeout_s=1.0)
        yield target, server
        await target.close()


@contextlib.contextmanager
def _direct_calls(server: MockGrpcServer) -> Iterator[None]:
    class Call:
        """What the target uses of a streaming call."""

        def __init__(self, prepared: bytes, timeout: float | None, metadata: Any) -> None:
            assert timeout is metadata is None
            self._messages = server._stream_generate(prepared, None)

        async def read(self) -> Any:
            return await anext(self._messages, grpc.aio.EOF)

        def cancel(self) -> None:
            pass

    class Connection:
        def __init__(self, *_: Any) -> None:
            self.stream = Call
            self.num_streams = 0
            self.channel = self

        def get_state(self, *, try_to_connect: bool) -> None:
            pass

        async def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.target.chairlift_grpc._Connection", Connection)
        yield


@contextlib.asynccontextmanager
async def _http(behaviour: MockBehaviour) -> AsyncIterator[tuple[Target, MockServer]]:
    server = MockHttpServer(behaviour)
    await server.start()
    target = OpenAiTarget(TargetSpec(server.url, "completions", model=behaviour.model), probe_timeout_s=1.0)
    await target._session.close()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        await web.UnixSite(server._runner, path).start()
        target._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json"},
        )
        await target.probe()  # it learns that messages count their tokens
        yield target, server
        await target.close()
        await server.close()
