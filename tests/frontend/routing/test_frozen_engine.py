"""A stopped engine process is lost because it answers no pings; one that only holds its GIL answers them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.routing import channel
from tests.hang import HANG_S

HEARTBEAT_TIMEOUT_S = 20.0  # longer than GIL_HELD_S and a stall of the machine
GIL_HELD_S = 8.0  # longer than the interval and the timeout of pings
ENGINE = """\
import asyncio, ctypes, signal, sys
from tests.support.frontend.fake_engine import FakeEngine

async def main():
    def hold():
        print("holding", flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # a PyDLL keeps the GIL

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hold)
    await FakeEngine(address=f"unix:{sys.argv[1]}").start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(name="engine")
async def start_engine(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", ENGINE, str(tmp_path / "e.sock")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    await process.wait()


@pytest.fixture(name="app")
async def start_app(
    tmp_path: Path, engine: asyncio.subprocess.Process, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FrontendApp]:
    address = f"unix:{tmp_path / 'e.sock'}"
    # Pings get a smaller share than usual, so that missed pings and missed heartbeats are seconds apart.
    monkeypatch.setattr(channel, "_PING_EVERY", 0.08)
    monkeypatch.setattr(channel, "_PING_TIMEOUT", 0.2)
    config = FrontendConfig(port=0, http=False, engine=(address,), heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    app = FrontendApp(config)
    await app.start()
    await app.wait_serving(HANG_S)
    yield app
    await app.stop()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)  # another process is waited for


@pytest.mark.slow
async def test_stopped_process_is_lost_before_its_heartbeats_are_missed(
    engine: asyncio.subprocess.Process, app: FrontendApp, caplog: pytest.LogCaptureFixture
) -> None:
    engine.send_signal(signal.SIGSTOP)
    await until(lambda: not app.engines.serving)
    assert "ping timeout" in caplog.text
    assert "no message for" not in caplog.text
    engine.send_signal(signal.SIGCONT)
    await app.wait_serving(HANG_S)


@pytest.mark.slow
async def test_process_that_holds_its_gil_is_not_lost(
    engine: asyncio.subprocess.Process, app: FrontendApp, caplog: pytest.LogCaptureFixture
) -> None:
    (attached,) = app.engines._connections.values()
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.send_signal(signal.SIGUSR1)
    assert await engine.stdout.readline() == b"holding\n"
    await asyncio.sleep(GIL_HELD_S)  # pings are sent meanwhile
    num_before = attached._num_messages
    engine.stdin.write(b"\n")
    await until(lambda: attached._num_messages > num_before)
    assert "lost the engine" not in caplog.text
    assert app.engines.serving
