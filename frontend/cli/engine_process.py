"""The engine as a subprocess: started, restarted with growing pauses when it dies, and never left behind.

Three things keep it from outliving its parent: `stop`, `kill`, and its standard input, a pipe held open here. However
this process ends, the pipe closes, and `--exit-on-stdin-close` ends the engine.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Sequence

from frontend.child_process import RestartPauses, describe_end, kill_group

_logger = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
"""Exit status of an engine that cannot run with these flags or this model: starting it again is of no use."""

_FIRST_PAUSE_S = 0.5


class EngineProcess:
    """Keeps one engine running.

    Args:
        command: program and flags.
        first_pause_s: seconds before the first restart; each further pause is twice as long, 30 s at most.
    """

    def __init__(self, command: Sequence[str], *, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._command = command
        self._pauses = RestartPauses(first_pause_s)
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()  # held while a process is made: `stop` must not miss it
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Runs the engine until `stop`, or until it says `BAD_CONFIGURATION`; returns its last exit status."""
        status = 0
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                status = await self._run_once()
                end = f"the engine ended: {describe_end(status)}"
            except OSError as error:  # no process, memory or program is to be had
                status, end = 1, f"the engine cannot be started: {error}"
            if self._stopping.is_set() or status == BAD_CONFIGURATION:
                break
            pause_s = self._pauses.next_s(time.monotonic() - started_s)
            _logger.warning("%s; starting it again in %g s", end, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
        return status

    async def stop(self, grace_s: float) -> None:
        """Asks the engine to end, kills it after `grace_s`. `run` returns once it is gone."""
        self._stopping.set()
        async with self._starting:
            process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            _logger.warning("the engine did not end within %g s; killing it", grace_s)
            self.kill()

    def kill(self) -> None:
        """Ends the engine and whatever it has started, at once."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def _run_once(self) -> int:
        # In a session of its own a terminal's Ctrl-C does not reach it: we drain first. What it prints goes to our
        # stderr, as our stdout is for answers.
        async with self._starting:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr.fileno(), start_new_session=True
            )
        _logger.info("engine started, pid %d", process.pid)
        status = await process.wait()
        self._process = None
        kill_group(process.pid)  # helpers of an engine that died would keep its memory
        return status
