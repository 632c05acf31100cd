"""An engine as a process of its own, for tests: started on a socket, listened to on stderr, never left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'protos'}", "HF_HUB_OFFLINE": "1"}
"""Of such a process: it runs this code, wherever it is started, and asks no hub."""

END_TIMEOUT_S = 300.0


def run_main(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Runs a program that starts an engine of its own making, on a socket in this folder, until it ends.

    Args:
        code: of the program; its one argument is the socket.
        folder: for both.
    """
    script = folder / "main.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(folder / "engine.sock")]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


class EngineProcess:
    """One engine, and what it has said on stderr.

    Args:
        process: as it was started, with pipes.
        address: where it serves.

    Attributes:
        lines: what has been read of its stderr.
    """

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address
        self.lines: list[str] = []

    async def said(self, words: str) -> str:
        """Waits for a line that contains these words."""
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said: {''.join(self.lines)}")

    async def ended(self) -> int:
        """The exit status; nobody is left who holds its standard error."""
        assert self._process.stderr is not None
        async with asyncio.timeout(END_TIMEOUT_S):
            self.lines += (await self._process.stderr.read()).decode().splitlines(keepends=True)
            return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal. Not by `Process.send_signal`, which may reap a child that asyncio waits for."""
        os.kill(self._process.pid, number)

    def close_stdin(self) -> None:
        """What its parent's end looks like."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def complaints(self) -> list[str]:
        """The lines that say what keeps it from serving."""
        return [line for line in self.lines if line.startswith("chairlift-engine: error: ")]


@contextlib.asynccontextmanager
async def engine_process(folder: Path, *flags: object) -> AsyncIterator[EngineProcess]:
    """Starts an engine with one thread.

    Args:
        folder: where it runs, with its socket in it.
        flags: of `chairlift-engine`.
    """
    socket_path = folder / "engine.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "engine", "--uds", str(socket_path), "--threads", "1", *map(str, flags)),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        cwd=folder,
    )
    try:
        yield EngineProcess(process, f"unix:{socket_path}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
