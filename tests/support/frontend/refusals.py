"""`python -m tests.support.frontend.refusals [CALLS]`: measures the cost of refusing a burst when the queue is full.

A frontend whose queue has one place, and somebody in it, gets bursts over both endpoints from another process. Rounds
in which calls are refused when they arrive alternate with rounds in which they are read and checked first.
"""

import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from typing import Any
from unittest import mock

import aiohttp
import grpc

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.generation.admission import Admission
from tests.support.frontend.fake_engine import paused_engine

_ROUNDS = 3
_CALLS_PER_CHANNEL = 2500  # a connection has 4,096 streams at most
_CONNECTIONS = 256  # over HTTP


def burst(endpoint: str, num_calls: int, grpc_port: int, http_port: int) -> list[float]:
    """Sends calls that are all refused; returns the seconds that each took, in order of their length."""
    return sorted(asyncio.run((_grpc_burst if endpoint == "gRPC" else _http_burst)(num_calls, grpc_port, http_port)))


async def _grpc_burst(num_calls: int, port: int, _: int) -> list[float]:
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        stubs: list[Any] = []
        for _channel in range(-(-num_calls // _CALLS_PER_CHANNEL)):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))
            await channel.channel_ready()
            stubs.append(GenerationServiceStub(channel))
        request = pb.GenerateRequest(spec=pb.GenerationSpec(text="once upon a time " * 50))

        async def one(stub: Any) -> float:
            start_s = time.monotonic()
            code = await stub.Generate(request).code()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, code
            return time.monotonic() - start_s

        return list(await asyncio.gather(*(one(stubs[index % len(stubs)]) for index in range(num_calls))))


async def _http_burst(num_calls: int, _: int, port: int) -> list[float]:
    body = b'{"prompt": "' + b"once upon a time " * 50 + b'"}'
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_CONNECTIONS)) as session:

        async def one() -> float:
            start_s = time.monotonic()
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", data=body, headers=headers) as response:
                await response.read()
                assert response.status == 429, response.status
            return time.monotonic() - start_s

        return list(await asyncio.gather(*(one() for _ in range(num_calls))))


async def _main(num_calls: int) -> None:
    engine = paused_engine()
    config = FrontendConfig(port=0, http_port=0, engine=(await engine.start(),), max_queued_requests=1, nice=0)
    app = FrontendApp(config)
    await app.start()
    await app.wait_serving(60)
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
        stub: Any = GenerationServiceStub(channel)
        waiting = asyncio.ensure_future(stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="x"))))
        await engine.wait_for(lambda: bool(engine.submissions))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
            for round_number in range(_ROUNDS):
                for endpoint in ("gRPC", "HTTP"):
                    for early in (False, True):
                        start_s = time.thread_time()
                        with mock.patch.object(Admission, "check_capacity", _check_capacity if early else _no_check):
                            ports = app.port, app.http_port or 0
                            times_s = await loop.run_in_executor(clients, burst, endpoint, num_calls, *ports)
                        cpu_us = (time.thread_time() - start_s) / num_calls * 1e6
                        p50_s, p99_s = times_s[len(times_s) // 2], times_s[len(times_s) * 99 // 100]
                        sys.stdout.write(
                            f"round {round_number} {endpoint} {'on arrival' if early else 'when checked':12} "
                            f"p50 {p50_s:6.3f} s  p99 {p99_s:6.3f} s  {cpu_us:6.0f} us of CPU each\n"
                        )
                        sys.stdout.flush()
        waiting.cancel()
    await app.stop()
    await engine.kill()


_check_capacity = Admission.check_capacity


def _no_check(admission: Admission, now_s: float) -> None:
    """Stands for `check_capacity` in rounds without it."""


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000))
