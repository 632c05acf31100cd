"""Runs engines as separate processes, for tests. Each serves on a socket and is killed with its test."""

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
"""Environment of an engine process: imports this code from any folder, and contacts no hub."""

END_TIMEOUT_S = 300.0


_MAIN = """
import itertools
import sys
import threading
from dataclasses import replace
from types import ModuleType

from engine.__main__ import main
from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import DeviceError
from tests.support.engine.fake_engine import fake_engine_parts

{code}

builder = ModuleType("engine.startup.build")  # the real one imports torch
builder.build_engine = lambda *_: build_parts()
sys.modules[builder.__name__] = builder
sys.exit(main(["--uds", *sys.argv[1:]]))
"""


def run_fake_engine(code: str, folder: Path, *flags: object) -> "subprocess.CompletedProcess[str]":
    """Runs `chairlift-engine` with a fake model until it ends.

    Args:
        code: defines `build_parts`, which returns the `EngineParts` to serve.
        folder: folder of the socket.
        flags: flags of `chairlift-engine`.
    """
    command = [sys.executable, "-c", _MAIN.format(code=code), str(folder / "engine.sock"), "--log-level", "warning"]
    return subprocess.run([*command, *map(str, flags)], env=ENVIRONMENT, capture_output=True, text=True)


class EngineProcess:
    """A running engine process and its log.

    Args:
        process: the process, started with pipes.
        address: address of the engine.

    Attributes:
        lines: lines of its stderr that have been read.
    """

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self._process = process
        self.address = address
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def said(self, words: str) -> str:
        """Waits for a line of stderr with these words, and returns it."""
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said: {''.join(self.lines)}")

    async def ended(self) -> int:
        """Waits until no process holds its stderr open any more, and returns the exit status."""
        assert self._process.stderr is not None
        async with asyncio.timeout(END_TIMEOUT_S):
            self.lines += (await self._process.stderr.read()).decode().splitlines(keepends=True)
            return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; `Process.send_signal` might reap a child that asyncio waits for."""
        os.kill(self._process.pid, number)

    def close_stdin(self) -> None:
        """Closes its stdin, as the end of its parent would."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def complaints(self) -> list[str]:
        """The error lines of its log."""
        return [line for line in self.lines if line.startswith("chairlift-engine: error: ")]


@contextlib.asynccontextmanager
async def engine_process(folder: Path, *flags: object, prefix: tuple[str, ...] = ()) -> AsyncIterator[EngineProcess]:
    """Starts an engine with one thread; kills it at the end of the block.

    Args:
        folder: its working directory, and the folder of its socket.
        flags: flags of `chairlift-engine`.
        prefix: a command that runs it.
    """
    socket_path = folder / "engine.sock"
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable),
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
