"""Tests of `EngineProcess`, with Unix programs as the engine."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.cli.engine_process import EngineProcess
from frontend.routing.supervision import EngineEnd, note_path, read_note


class Waiter(logging.Handler):
    """Sets an event at the n-th message, after calling a function."""

    def __init__(self, num_messages: int, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.done = asyncio.Event()
        self._num_messages = num_messages
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == self._num_messages:
            self.done.set()
            self._then()


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe through which a program reports that it is ready."""
    path = tmp_path / "ready"
    os.mkfifo(path)
    return path


async def test_pauses_double_until_stopped():
    stops: list[asyncio.Task[None]] = []
    waiter = Waiter(4, lambda: stops.append(asyncio.create_task(engine.stop(1))))
    logger = logging.getLogger("frontend.cli.engine_process")
    logger.addHandler(waiter)
    try:
        engine = EngineProcess(["/bin/sh", "-c", "exit 3"], first_pause_s=0.01)
        assert await engine.run() == 3
        await asyncio.gather(*stops)
    finally:
        logger.removeHandler(waiter)
    expected = [
        f"the engine ended: exit status 3; restarting it in {pause} s" for pause in ("0.01", "0.02", "0.04", "0.08")
    ]
    assert waiter.messages == expected


async def test_engine_that_cannot_be_started_is_retried():
    """For example because there are temporarily too many processes."""
    waiter = Waiter(2)
    logger = logging.getLogger("frontend.cli.engine_process")
    logger.addHandler(waiter)
    try:
        engine = EngineProcess(["/nonexistent/program"], first_pause_s=0.01)
        running = asyncio.create_task(engine.run())
        await waiter.done.wait()
        await engine.stop(1)
        assert await running == 1
    finally:
        logger.removeHandler(waiter)
    assert waiter.messages[0] == (
        "the engine cannot be started: [Errno 2] No such file or directory: '/nonexistent/program'; restarting it "
        "in 0.01 s"
    )


async def test_configuration_error_is_not_retried():
    assert await EngineProcess(["/bin/sh", "-c", "exit 2"]).run() == 2


async def test_standard_input_stays_open_until_stop_ends_the_program(fifo):
    engine = EngineProcess(["/bin/sh", "-c", f"echo $$ > {fifo}; exec sleep 1000"])
    running = asyncio.create_task(engine.run())
    pid = int(await asyncio.to_thread(fifo.read_text))
    assert str(Path(f"/proc/{pid}/fd/0").readlink()).startswith("pipe:")
    await engine.stop(10)
    assert await running == -15


async def test_program_that_ignores_sigterm_is_killed_after_the_grace_period(fifo):
    program = (
        f"import signal; signal.signal(15, signal.SIG_IGN); open({str(fifo)!r}, 'w').write('ready'); signal.pause()"
    )
    engine = EngineProcess([sys.executable, "-S", "-c", program])
    running = asyncio.create_task(engine.run())
    assert await asyncio.to_thread(fifo.read_text) == "ready"
    await engine.stop(0.05)
    assert await running == -9


async def test_stop_during_a_pause_and_before_the_start():
    waiter = Waiter(1)
    logger = logging.getLogger("frontend.cli.engine_process")
    logger.addHandler(waiter)
    engine = EngineProcess(["/bin/sh", "-c", "exit 1"], first_pause_s=60)
    running = asyncio.create_task(engine.run())
    await waiter.done.wait()
    logger.removeHandler(waiter)
    await engine.stop(1)
    assert await running == 1

    engine = EngineProcess(["/bin/cat"])
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0)  # the program is being started
    await engine.stop(10)
    assert await running == -15


@pytest.mark.parametrize("end", [lambda engine: engine.stop(10), lambda engine: asyncio.to_thread(engine.kill)])
async def test_child_processes_of_the_program_end_with_it(fifo, end):
    program = f"(echo ready; exec sleep 1000) > {fifo} & wait; exit 2"
    engine = EngineProcess(["/bin/sh", "-c", program], first_pause_s=60)
    running = asyncio.create_task(engine.run())
    pipe = await asyncio.to_thread(fifo.open)
    assert await asyncio.to_thread(pipe.readline) == "ready\n"
    async with engine._starting:  # the program may run before its parent knows its pid
        pass
    await end(engine)
    assert await asyncio.to_thread(pipe.read) == ""  # the pipe closes when the child process that holds it ends
    pipe.close()
    await engine.stop(10)
    assert await running < 0


NOTIFYING = """\
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
    notices.sendto(b"READY=1\\nX_INSTANCE_ID=%d" % os.getpid(), os.environ["NOTIFY_SOCKET"])
os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_engine_killed_as_soon_as_it_serves_is_noted_and_restarted_without_backoff(tmp_path):
    waiter = Waiter(6)
    logger = logging.getLogger("frontend.cli.engine_process")
    logger.addHandler(waiter)
    engine_socket = tmp_path / "engine.sock"
    try:
        engine = EngineProcess([sys.executable, "-S", "-c", NOTIFYING], engine_socket=engine_socket, first_pause_s=0.01)
        running = asyncio.create_task(engine.run())
        await waiter.done.wait()
        note = read_note(note_path(engine_socket))
        await engine.stop(10)
        await running
    finally:
        logger.removeHandler(waiter)
    assert waiter.messages[:6] == ["the engine ended: killed by SIGKILL; restarting it in 0.01 s"] * 6
    assert note is not None
    assert list(note.ends.values()) == [EngineEnd.KILLED] * 6
    assert all(pid.isdecimal() for pid in note.ends)
    last = read_note(note_path(engine_socket))
    assert last is not None
    assert last.restart_until_s <= time.monotonic(), "after `stop` no restart is to be expected"
