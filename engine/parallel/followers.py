"""The processes of the other ranks, started and monitored by rank 0.

If one rank of a group ends, the others would hang in their next collective. So when a rank ends or a step takes too
long, all of them are ended. A follower detects the end of rank 0 by its standard input, a pipe that rank 0 holds open;
rank 0 detects the end of a follower by their channel. `engine.startup.follower` describes the messages.
"""

import atexit
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from engine.errors import EngineError, StepError
from engine.parallel.process_group import ProcessGroup

# -P keeps the current directory, which may hold a folder named engine, off the module path.
FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "engine.startup.follower")

START_TIMEOUT_S = 120.0
"""Shortest timeout for each phase of the start: importing libraries, connecting, and loading after rank 0."""

_TICK_S = 1.0  # interval of the timeout check
_SETTLE_S = 2.0  # how long a failed step waits for the end of a follower that would explain it
_STOP_GRACE_S = 5.0  # for ranks to leave their group

OnFailure = Callable[[EngineError], None]

_log = logging.getLogger(__name__)


class Followers:
    """Ranks 1 to size - 1 of a group, each a process on this machine.

    One thread monitors all of them. It reports the first failure to `on_failure`, unless `close` was called before, so
    that at most one failure is reported.

    Attributes:
        meeting_folder: folder through which the ranks connect; only this user can enter it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        timeout_s: float,
        on_failure: OnFailure,
        command: Sequence[str] = FOLLOWER_COMMAND,
    ) -> None:
        """Starts the processes.

        Args:
            group: group of this process, rank 0; `close` leaves it.
            timeout_s: timeout of a step, and of the phases of the start if longer than `START_TIMEOUT_S`.
            on_failure: called on another thread with the error that ends the group. It should end this process, whose
                main thread may hang in a collective.
            command: program of a follower; the file descriptor of its channel is appended.
        """
        self._group = group
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._ending = threading.Lock()
        self._has_ended = False
        self._is_closed = False
        self._waiting: tuple[str, float, float] | None = None  # for what, since when, timeout
        self._num_ready = 0
        self._all_ready = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-ranks-")  # mode 0700
        self.meeting_folder = Path(self._folder.name)
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._names: dict[Connection, str] = {}
        atexit.register(self.close)
        for rank in range(1, group.size):
            self._start(rank, command)
        self._watch_thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watch_thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 1 first."""
        return [process.pid for process in self._processes.values()]

    def assign(self, assignments: Sequence[object]) -> None:
        """Sends each follower its assignment, rank 1 first."""
        with self.waiting_for("the other ranks to start", START_TIMEOUT_S):
            for channel, assignment in zip(self._processes, assignments, strict=True):
                channel.send(assignment)

    def wait_ready(self) -> None:
        """Waits until all have loaded their shard; called when rank 0 has."""
        with self.waiting_for("the other ranks to load", START_TIMEOUT_S):
            self._all_ready.wait()

    def send(self, message: bytes) -> None:
        """Sends a message to every follower; blocks while one is far behind."""
        for channel in self._processes:
            channel.send_bytes(message)

    @contextlib.contextmanager
    def waiting_for(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """Ends the group if the body, which depends on the other ranks, takes longer than the timeout.

        An error of the body is delayed for a moment, so that the end of a follower is reported as the cause.
        """
        self._waiting = (what, time.monotonic(), max(at_least_s, self._timeout_s))
        try:
            yield
        except Exception:
            self._watch_thread.join(_SETTLE_S)
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        """Ends the followers. May be called twice; blocks while `on_failure` runs."""
        with self._ending:
            self._has_ended = True
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for channel, process in self._processes.items():
            assert process.stdin is not None
            if not self._all_ready.is_set():
                process.stdin.close()  # it may be loading or connecting: exits immediately
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as end:
                end.shutdown(socket.SHUT_WR)  # no more plans: they leave the group and exit
        leaving = threading.Thread(target=self._group.leave, daemon=True)  # hangs if a rank hangs
        leaving.start()
        until_s = time.monotonic() + _STOP_GRACE_S
        leaving.join(_STOP_GRACE_S)
        for process in self._processes.values():
            _wait(process, max(0.0, until_s - time.monotonic()))
        self._watch_thread.join()
        for channel, process in self._processes.items():
            channel.close()
            assert process.stdin is not None
            process.stdin.close()
        self._folder.cleanup()

    def _start(self, rank: int, command: Sequence[str]) -> None:
        channel, far_end = Pipe()
        process = subprocess.Popen(
            [*command, str(far_end.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[far_end.fileno()],
        )
        far_end.close()
        self._processes[channel] = process
        self._names[channel] = f"rank {rank} (process {process.pid})"
        _log.info("Started %s", self._names[channel])

    def _watch(self) -> None:
        channels = list(self._processes)
        while channels:
            for channel in wait(channels, _TICK_S):
                assert isinstance(channel, Connection)
                try:
                    self._handle(channel, channel.recv())
                except (EOFError, OSError):
                    channels.remove(channel)
                    status = _wait(self._processes[channel])  # only the follower holds the other end
                    self._fail(StepError(f"{self._names[channel]} {_describe(status)}"))
            self._check_clock()

    def _handle(self, channel: Connection, message: EngineError | None) -> None:
        """Handles a message of a follower: None when it is ready, an error before it exits."""
        if message is not None:
            self._fail(type(message)(f"{self._names[channel]}: {message}"))
            return
        self._num_ready += 1
        if self._num_ready == len(self._processes):
            self._all_ready.set()

    def _check_clock(self) -> None:
        waiting = self._waiting  # read once: another thread writes it
        if waiting is None:
            return
        what, since_s, most_s = waiting
        if time.monotonic() - since_s > most_s:
            which = " or ".join(self._names.values())
            self._fail(StepError(f"rank 0 has waited more than {most_s:g} s for {what}: {which} hangs"))

    def _fail(self, error: EngineError) -> None:
        with self._ending:
            if not self._has_ended:
                self._has_ended = True
                for process in self._processes.values():
                    process.kill()  # a suspended one would not notice the end of rank 0
                self._on_failure(error)


def _wait(process: subprocess.Popen[bytes], timeout_s: float = _STOP_GRACE_S) -> int:
    """Returns the exit status of a process that is ending; kills it after the timeout."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no name
        return f"was killed by signal {-status}"
