"""Starts real worker processes with a FakeEngine on the test's event loop."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.processes import child_pids, command_line, kill


class Frontend:
    """`chairlift-frontend` as a process, and clients that each have a connection of their own."""

    def __init__(self, process: asyncio.subprocess.Process, engine: FakeEngine) -> None:
        self.process = process
        self.engine = engine
        self.log: list[str] = []
        self.ports: dict[str, int] = {}
        self.pids: set[int] = set()
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode().rstrip())
            if found := re.search(r"listening on .*:(\d+),", self.log[-1]):
                self.ports["grpc"] = int(found[1])
            if found := re.search(r"listening for HTTP on port (\d+)", self.log[-1]):
                self.ports["http"] = int(found[1])
            self._changed.set()
            self._changed = asyncio.Event()

    async def logged(self, words: str, times: int = 1) -> str:
        """Waits until `times` lines of the log contain `words`; returns the last of them."""
        while len(lines := [line for line in self.log if words in line]) < times:
            changed = self._changed
            await changed.wait()
        return lines[-1]

    async def end(self) -> tuple[int, str, list[str]]:
        """Waits until the process ends; returns its exit status, standard output and log."""
        assert self.process.stdout is not None
        stdout = await self.process.stdout.read()
        await self._reader
        return await self.process.wait(), stdout.decode(), self.log

    def channel(self) -> grpc.aio.Channel:
        """Returns a channel with its own connection, for which the kernel picks a worker."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['grpc']}", options=options)

    async def generate(self, text: str) -> str:
        """Returns one answer over gRPC."""
        async with self.channel() as channel:
            request = pb.GenerateRequest(spec=pb.GenerationSpec(text=text))
            return (await GenerationServiceStub(channel).Generate(request)).text

    async def refuses_calls(self) -> bool:
        """Returns whether the worker that gets a new connection refuses calls, as it does while it drains."""
        async with self.channel() as channel:
            try:
                await GenerationServiceStub(channel).GetModel(pb.GetModelRequest())
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    async def http(self, path: str, body: bytes | None = None) -> bytes:
        """Returns the body of one answer over HTTP."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports["http"])
        verb = "GET" if body is None else "POST"
        head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body or b'')}\r\n\r\n"
        writer.write(head.encode() + (body or b""))
        answer = await reader.read()
        writer.close()
        head_lines, _, rest = answer.partition(b"\r\n\r\n")
        assert head_lines.startswith(b"HTTP/1.1 200"), answer
        return rest

    async def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Returns all samples by name and labels; fails if one occurs twice."""
        samples = {}
        for family in text_string_to_metric_families((await self.http("/metrics")).decode()):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in samples, f"{key} occurs twice"
                samples[key] = sample.value
        return samples

    async def total(self, name: str) -> float:
        """Returns the sum of one metric's samples in one scrape."""
        return sum(value for (found, _), value in (await self.scrape()).items() if found == name)

    async def reaches(self, name: str, value: float) -> None:
        """Waits until a metric has this value, because a request may be counted just after its answer."""
        while (await self.total(name)) != value:
            await asyncio.sleep(0.01)

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the workers."""
        return child_pids(self.process.pid)


Start = Callable[..., Awaitable[Frontend]]


@pytest.fixture
def environ() -> dict[str, str]:
    """Returns an environment in which other processes can import the same modules as this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture
async def start(environ: dict[str, str]) -> AsyncIterator[Start]:
    """start(*flags): runs a frontend, without HTTP unless `http`; with `wait`, returns when all workers serve."""
    started: list[Frontend] = []

    async def run(*flags: str, num_workers: int = 2, http: bool = False, wait: bool = True) -> Frontend:
        engine = FakeEngine()
        await engine.start()
        http_flags = (
            ("--http-port", "0") if http else ("--no-http",)
        )  # a process with HTTP starts and ends 0.4 s slower
        defaults = ("--port", "0", *http_flags, "--engine", engine.address, "--heartbeat-timeout", "60")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "frontend", *defaults, "--workers", str(num_workers), *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
        )
        frontend = Frontend(process, engine)
        started.append(frontend)
        if wait:
            await frontend.logged("is serving", num_workers)
            await frontend.logged("workers listen")
            frontend.pids.update(frontend.worker_pids())
        return frontend

    yield run
    for frontend in started:
        if frontend.process.returncode is None:
            frontend.pids.update(frontend.worker_pids())
            frontend.process.kill()
        for pid in frontend.pids:  # a worker that outlives its parent would keep the pipe open
            if b"frontend.workers.worker" in command_line(pid):
                kill(pid)
        _, _, log = await frontend.end()  # the pipe closes when the last worker has ended
        sys.stdout.write("\n".join(log))  # pytest shows it if the test failed
        await frontend.engine.kill()
