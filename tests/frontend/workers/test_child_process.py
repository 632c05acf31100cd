"""Tests of `frontend.workers.child_process`."""

import asyncio
import contextlib
import os
import subprocess

import pytest

from frontend.workers.child_process import terminate


@pytest.fixture
async def child(monkeypatch):
    """A process that asyncio waits for and that only asyncio may reap."""
    process = await asyncio.create_subprocess_exec("/bin/sleep", "1000")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "poll", lambda popen: pytest.fail(f"{popen.args} was polled"))
        yield process
    if process.returncode is None:
        process.kill()
        await process.wait()


async def test_terminate_leaves_the_exit_status_to_asyncio(child):
    terminate(child)
    assert await child.wait() == -15


async def test_terminate_after_the_end(child):
    os.kill(child.pid, 9)
    with contextlib.suppress(ChildProcessError):  # a watcher thread of asyncio has reaped it
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.returncode is None  # the event loop has not run
    terminate(child)
    assert await child.wait() == -9
    terminate(child)
