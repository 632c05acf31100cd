"""`python -m tests.support.frontend.isolation`: measures how long each of many large requests delays all others.

Starts a frontend in front of an engine without a model, sends the requests one after the other from another process,
and prints for each the CPU time of the event loop's longest callback, and how late a probe was that wanted its turn
every 5 ms. The first is a property of the code, the second also one of the machine and of what else runs there.
"""

import asyncio
import gc
import multiprocessing
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.garbage import collect_when_idle
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine
from tests.support.frontend.large_requests import LARGE_REQUESTS, MAX_MODEL_LEN, Outcome, send
from tests.support.frontend.loop_watch import watched_loop

PROBE_INTERVAL_S = 0.005


class Measured(NamedTuple):
    """One request.

    Attributes:
        held_s: CPU time of the longest hold of the event loop.
        by: what held it.
        late_s: the longest time that the probe had to wait for its turn.
        took_s: until the answer was there.
    """

    name: str
    outcome: Outcome
    held_s: float
    by: str
    late_s: float
    took_s: float


async def measured(names: Sequence[str]) -> AsyncGenerator[Measured, None]:
    """Sends large requests to a pair of its own, one after the other."""
    with watched_loop() as watch:
        async with _frontend() as app:
            loop, spawn = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
            assert app.http_port is not None
            with ProcessPoolExecutor(1, spawn) as clients:
                await loop.run_in_executor(clients, send, "levels", app.port, app.http_port)  # everything is imported
                probe = asyncio.create_task(_probe(lates := [0.0]))
                for name in names:
                    await asyncio.sleep(PROBE_INTERVAL_S)
                    watch.take()
                    lates[0] = 0.0
                    start_s = time.monotonic()
                    outcome = await loop.run_in_executor(clients, send, name, app.port, app.http_port)
                    took_s = time.monotonic() - start_s
                    await asyncio.sleep(PROBE_INTERVAL_S)
                    held_s, by = watch.take()
                    yield Measured(name, outcome, held_s, by, lates[0], took_s)
                probe.cancel()


@asynccontextmanager
async def _frontend() -> AsyncIterator[FrontendApp]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    engine = spawn.Process(target=_serve_engine, args=(theirs,), daemon=True)
    engine.start()
    address = await asyncio.to_thread(ours.recv)
    app = FrontendApp(FrontendConfig(port=0, http_port=0, engine=(address,), nice=0, tool_call_parser="qwen3_coder"))
    thresholds = gc.get_threshold()
    try:
        await app.start()
        await app.wait_serving(HANG_S)
        gc.collect()
        collect_when_idle(app.calls)
        yield app
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        await app.stop()
        ours.close()
        engine.join()


def _serve_engine(pipe: Connection) -> None:
    async def serve() -> None:
        engine = FakeEngine(max_model_len=MAX_MODEL_LEN)
        pipe.send(await engine.start())
        await asyncio.to_thread(pipe.poll, None)  # until the other end is closed
        await engine.kill()

    asyncio.run(serve())


async def _probe(lates: list[float]) -> None:
    while True:
        due_s = time.monotonic() + PROBE_INTERVAL_S
        await asyncio.sleep(PROBE_INTERVAL_S)
        lates[0] = max(lates[0], time.monotonic() - due_s)


async def _main(patterns: Sequence[str]) -> None:
    names = [name for name in LARGE_REQUESTS if not patterns or any(pattern in name for pattern in patterns)]
    sys.stdout.write("held, ms  late, ms   took, s  request\n")
    async for one in measured(names):
        numbers = f"{one.held_s * 1e3:8.1f} {one.late_s * 1e3:9.1f} {one.took_s:9.2f}"
        sys.stdout.write(f"{numbers}  {one.name}: {one.outcome.code}, {one.by}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
