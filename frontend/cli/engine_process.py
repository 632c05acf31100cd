"""Runs the engine as a subprocess and restarts it with growing pauses when it dies.

An engine reports that it serves by systemd's notification protocol (sd_notify(3)), with its instance id.
`restart_policy.py` decides about restarts; frontends read its state from a file beside the engine's socket.

The engine cannot outlive this process: its standard input is a pipe from here, which closes with this process, and
`--exit-on-stdin-close` then ends the engine.
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
"""Exit status of an engine that cannot run with these flags or this model; it is not restarted."""

_FIRST_PAUSE_S = 0.5
_NOTIFY_VARIABLE = "NOTIFY_SOCKET"
_MAX_NOTICE_BYTES = 4096


class EngineProcess:
    """Keeps one engine running.

    Args:
        command: program and flags.
        engine_socket: where the engine listens; the supervisor's file is beside it. None: no file is written.
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
        self._starting = asyncio.Lock()  # held while a process is created, so that `stop` does not miss it
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Runs the engine until `stop`, or until it exits with `BAD_CONFIGURATION`; returns its last exit status."""
        status = 0
        with self._listening():
            while not self._stopping.is_set():
                started_s, num_oom_kills_before = time.monotonic(), num_oom_kills()
                try:
                    status = await self._run_once()
                    end = f"the engine ended: {describe_end(status)}"
                except OSError as error:  # no memory, process id or program
                    status, end = 1, f"the engine cannot be started: {error}"
                now_s = time.monotonic()
                if self._stopping.is_set() or status == BAD_CONFIGURATION:
                    break
                self._read_notices()  # sent before it ended
                was_out_of_memory = num_oom_kills() != num_oom_kills_before
                pause_s = self._policy.ended(status, now_s - started_s, now_s, was_out_of_memory=was_out_of_memory)
                self._write_note()
                _logger.warning("%s; restarting it in %g s", end, pause_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
            self._policy.expect_nothing(time.monotonic())
            self._write_note()
        return status

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM to the engine and kills it after `grace_s`. `run` returns once it has ended."""
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
        """Kills the engine and its child processes."""
        if self._process is not None:
            kill_group(self._process.pid)

    async def _run_once(self) -> int:
        # A separate session keeps a terminal's Ctrl-C from it: the frontend drains first. Its output goes to stderr,
        # because stdout is for answers.
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
        kill_group(process.pid)  # child processes of a dead engine would keep its memory
        return status

    # The engine's notifications and the supervisor's file.

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Receives the engine's notifications, if its socket has a folder."""
        if self._engine_socket is None:
            yield
            return
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.setblocking(False)
            notices.bind(str(_notify_path(self._engine_socket)))
            self._notices = notices
            loop.add_reader(notices, self._read_notices)
            try:
                yield
            finally:
                loop.remove_reader(notices)
                self._notices = None

    def _environment(self) -> dict[str, str]:
        """Returns the engine's environment, with this supervisor's notification socket."""
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
            _logger.warning("cannot write the supervisor's file, so frontends do not learn of restarts: %s", error)


def _notify_path(engine_socket: Path) -> Path:
    return engine_socket.with_name("notify.sock")
