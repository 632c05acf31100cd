"""The processes of the other ranks, started and monitored by rank 0, and on other machines by `engine.startup.node`.

If one rank of a group ends, the others would hang in their next collective. So when a rank ends or a step takes too
long, all of them are ended. A follower detects the end of the process that started it by its standard input, a pipe
that this process holds open, which in turn detects the end of a follower by their channel. `engine.startup.follower`
describes the messages. Rank 0 has one connection to each other machine, which passes plans on to its ranks, and reports
in JSON: that they are ready, an error that ends the group, or that the machine is asked to stop.
"""

import atexit
import contextlib
import json
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
from typing import Any

from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError, StepError
from engine.parallel.nodes import NodeLink
from engine.parallel.plans import LEAVE

# -P keeps the current directory, which may hold a folder named engine, off the module path.
FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "engine.startup.follower")

START_TIMEOUT_S = 120.0
"""Shortest timeout for each phase of the start: importing libraries, connecting, and loading after rank 0."""

SETTLE_S = 2.0
"""How long a failed step waits for the end of a process that would explain it."""

_TICK_S = 1.0  # interval of the timeout check
_STOP_GRACE_S = 5.0  # for ranks to leave their group

OnFailure = Callable[[EngineError], None]

READY = b'{"ready": true}'
"""Report of a node whose ranks have loaded their shards."""

STOPPING = b'{"stopping": true}'
"""Report of a node that was asked to stop, so that the group should drain."""

_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DeviceError, StepError)}

_log = logging.getLogger(__name__)


class Followers:
    """The other ranks of a group on this machine, each a process, and the other machines.

    One thread monitors all of them. It reports the first failure to `on_failure`, unless `close` was called before, so
    that at most one failure is reported.

    Attributes:
        meeting_folder: folder through which the ranks connect; only this user can enter it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        on_failure: OnFailure,
        on_stopping: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
        links: Sequence[NodeLink] = (),
        owner: str = "rank 0",
        command: Sequence[str] = FOLLOWER_COMMAND,
    ) -> None:
        """Starts the processes.

        Args:
            ranks: those to start.
            timeout_s: timeout of a step, and of the phases of the start if longer than `START_TIMEOUT_S`.
            on_failure: called on another thread with the error that ends the group. It should end this process, whose
                main thread may hang in a collective.
            on_stopping: called on another thread when another machine is asked to stop: this process should drain.
            leave: leaves the group of this process, rank 0; called by `close`.
            links: to the other machines; `close` closes them.
            owner: this process, in messages.
            command: program of a follower; the file descriptor of its channel is appended.
        """
        self._on_stopping = on_stopping
        self._leave = leave
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
        self._links = tuple(links)
        self._owner = owner
        self._names: dict[Connection | NodeLink, str] = {link: link.name for link in links}
        atexit.register(self.close)
        for rank in ranks:
            self._start(rank, command)
        self._watch_thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watch_thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the ranks."""
        return [process.pid for process in self._processes.values()]

    def assign(self, assignments: Sequence[object]) -> None:
        """Sends each follower its assignment, in the order of the ranks."""
        with self.waiting_for("the other ranks to start", START_TIMEOUT_S):
            for channel, assignment in zip(self._processes, assignments, strict=True):
                channel.send(assignment)

    def wait_ready(self, *, is_timed: bool = True) -> None:
        """Waits until all have loaded their shard; with a timeout if called when rank 0 has loaded its own."""
        with self.waiting_for("the other ranks to load", START_TIMEOUT_S) if is_timed else contextlib.nullcontext():
            self._all_ready.wait()

    def send(self, message: bytes) -> None:
        """Sends a message to every follower and machine; blocks while one is far behind."""
        for channel in self._processes:
            channel.send_bytes(message)
        for link in self._links:
            link.send_bytes(message)

    @contextlib.contextmanager
    def waiting_for(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """Ends the group if the body, which depends on the other ranks, takes longer than the timeout.

        An error of the body is delayed for a moment, so that the end of a follower is reported as the cause.
        """
        self._waiting = (what, time.monotonic(), max(at_least_s, self._timeout_s))
        try:
            yield
        except Exception:
            self._watch_thread.join(SETTLE_S)
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
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send_bytes(LEAVE)
        leaving = threading.Thread(target=self._leave, daemon=True)  # hangs if a rank hangs
        leaving.start()
        until_s = time.monotonic() + _STOP_GRACE_S
        leaving.join(_STOP_GRACE_S)
        for process in self._processes.values():
            _wait(process, max(0.0, until_s - time.monotonic()))
        self._watch_thread.join(_STOP_GRACE_S)  # a machine may not answer
        for link in self._links:
            link.close()
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
        channels: list[Any] = [*self._processes, *self._links]
        while channels:
            ready: list[Any] = wait(channels, _TICK_S)
            for channel in ready:
                try:
                    if isinstance(channel, Connection):
                        self._handle(channel, channel.recv())
                    else:
                        self._handle_report(channel, channel.recv_bytes())
                except (EOFError, OSError):
                    channels.remove(channel)
                    self._fail(StepError(f"{self._names[channel]} {self._end_of(channel)}"))
            self._check_clock()

    def _end_of(self, channel: Connection | NodeLink) -> str:
        if isinstance(channel, NodeLink):
            return "has left the group, or cannot be reached any more"
        return _describe(_wait(self._processes[channel]))  # only the follower holds the other end

    def _handle(self, channel: Connection | NodeLink, message: EngineError | None) -> None:
        """Handles a message of a follower or machine: None when it is ready, an error before it ends."""
        if message is not None:
            self._fail(type(message)(f"{self._names[channel]}: {message}"))
            return
        self._num_ready += 1
        if self._num_ready == len(self._names):
            self._all_ready.set()

    def _handle_report(self, link: NodeLink, report: bytes) -> None:
        """Handles a message of a machine. Raises: OSError: it is no report."""
        if report == STOPPING:
            _log.info("%s was asked to stop: draining", link.name)
            self._on_stopping()
            return
        try:
            error = None
            if report != READY:
                fields = json.loads(report)
                error = _ERRORS[fields["error"]](str(fields["text"]))
        except (ValueError, KeyError, TypeError):
            raise OSError("no report of a node") from None
        self._handle(link, error)

    def _check_clock(self) -> None:
        waiting = self._waiting  # read once: another thread writes it
        if waiting is None:
            return
        what, since_s, most_s = waiting
        if time.monotonic() - since_s > most_s:
            which = " or ".join(self._names.values())
            self._fail(StepError(f"{self._owner} has waited more than {most_s:g} s for {what}: {which} hangs"))

    def _fail(self, error: EngineError) -> None:
        with self._ending:
            if not self._has_ended:
                self._has_ended = True
                for process in self._processes.values():
                    process.kill()  # a suspended one would not notice the end of rank 0
                self._on_failure(error)


def error_report(error: EngineError) -> bytes:
    """Returns the report of an error that ends a node."""
    kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind) or kind is StepError)
    return json.dumps({"error": kind, "text": str(error)}).encode()


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
