"""The engine as a subprocess: started, restarted with growing pauses when it dies, and never left behind.

An engine says that it serves by systemd's notification protocol (sd_notify(3)), and names its instance. What follows
from its starts and ends is decided in `restart_policy.py`; frontends read it in a note (see
`frontend/routing/supervision.py`).

Three things keep it from outliving its parent: `stop`, `kill`, and its standard input, a pipe held open here. However
this process ends, the pipe closes, and `--exit-on-stdin-close` ends the engine.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from frontend.cli.restart_policy import RestartPolicy
from frontend.routing.supervision import note_path, write_note
from frontend.workers.child_process import describe_end, kill_group, num_oom_kills, terminate

_logger = logging.getLogger(__name__)

BAD_CONFIGURATION = 2
"""Exit status of an engine that cannot run with these flags or this model: starting it again is of no use."""

_FIRST_PAUSE_S = 0.5
_NOTIFY_VARIABLE = "NOTIFY_SOCKET"
_MAX_NOTICE_BYTES = 4096


class EngineProcess:
    """Keeps one engine running.

    Args:
        command: program and flags.
        engine_socket: where the engine listens; frontends find the supervisor's note beside it. None: nobody does.
        first_pause_s: seconds before the first restart; each further pause is twice as long, 30 s at most, until an
            engine serves.
    """

    def __init__(
        self, command: Sequence[str], *, engine_socket: Path | None = None, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        self._command = command
        self._engine_socket = engine_socket
        self._policy = RestartPolicy(first_pause_s)
        self._notices: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()  # held while a process is made: `stop` must not miss it
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Runs the engine until `stop`, or until it says `BAD_CONFIGURATION`; returns its last exit status."""
        status = 0
        with self._listening():
            while not self._stopping.is_set():
                started_s, num_oom_kills_before = time.monotonic(), num_oom_kills()
                try:
                    status = await self._run_once()
                    end = f"the engine ended: {describe_end(status)}"
                except OSError as error:  # no process, memory or program is to be had
                    status, end = 1, f"the engine cannot be started: {error}"
                now_s = time.monotonic()
                if self._stopping.is_set() or status == BAD_CONFIGURATION:
                    break
                self._read_notices()  # what it said before it ended
                was_out_of_memory = num_oom_kills() != num_oom_kills_before
                pause_s = self._policy.ended(status, now_s - started_s, now_s, was_out_of_memory=was_out_of_memory)
                self._write_note()
                _logger.warning("%s; starting it again in %g s", end, pause_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
            self._policy.expect_nothing(time.monotonic())
            self._write_note()
        return status

    async def stop(self, grace_s: float) -> None:
        """Asks the engine to end, kills it after `grace_s`. `run` returns once it is gone."""
        self._stopping.set()
        async with self._starting:
            process = self._process
        if process is None:
            return
        terminate(process)
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
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                start_new_session=True,
                env=self._environment(),
            )
        _logger.info("engine started, pid %d", process.pid)
        status = await process.wait()
        self._process = None
        kill_group(process.pid)  # helpers of an engine that died would keep its memory
        return status

    # The engine's notices and the supervisor's note.

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Takes notices of the engine, if there is a folder for that."""
        if self._engine_socket is None:
            yield
            return
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notices:
            notices.bind(str(_notify_path(self._engine_socket)))
            self._notices = notices
            loop.add_reader(notices, self._read_notices)
            try:
                yield
            finally:
                loop.remove_reader(notices)
                self._notices = None

    def _environment(self) -> dict[str, str]:
        """The engine's: a notification socket of our own supervisor is not the engine's."""
        environment = {name: value for name, value in os.environ.items() if name != _NOTIFY_VARIABLE}
        if self._engine_socket is not None:
            environment[_NOTIFY_VARIABLE] = str(_notify_path(self._engine_socket))
        return environment

    def _read_notices(self) -> None:
        while self._notices is not None:
            try:
                notice = self._notices.recv(_MAX_NOTICE_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            fields = dict(line.partition("=")[::2] for line in notice.splitlines())
            if fields.get("READY") == "1":
                self._policy.serves(fields.get("X_INSTANCE_ID", ""), time.monotonic())
                self._write_note()

    def _write_note(self) -> None:
        if self._engine_socket is None:
            return
        try:
            write_note(note_path(self._engine_socket), self._policy.note)
        except OSError as error:
            _logger.warning("cannot tell the frontends of restarts: %s", error)


def _notify_path(engine_socket: Path) -> Path:
    return engine_socket.with_name("notify.sock")
