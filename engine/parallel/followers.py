"""The other ranks' processes, seen from rank 0: started, watched, and never left behind.

A group of ranks lives and dies as one: with a rank its part of every layer is gone, and the others would wait for it in
their next collective for ever. So the first that ends, or that does not get a step done, ends all of them. A follower
hears of rank 0's end by its standard input, a pipe held open here; rank 0 hears of a follower's by their channel. What
they say to each other is in `engine.startup.follower`.
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
"""What ranks get at least to import their libraries, to meet, and to be ready after rank 0 is."""

_TICK_S = 1.0  # how late a step that takes too long may be noticed
_SETTLE_S = 2.0  # how long a failed step waits for news of a follower whose end would explain it
_STOP_GRACE_S = 5.0  # what ranks get to leave their group

OnFailure = Callable[[EngineError], None]

_log = logging.getLogger(__name__)


class Followers:
    """Ranks 1 to size - 1 of a group, each a process on this machine.

    One thread listens to all of them. The first that it learns of an end of the group goes to `on_failure`, unless
    `close` came before: the two exclude each other, so that an end is reported once.

    Attributes:
        meeting_folder: where the ranks find each other; only this user can enter it.
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
            group: of this process, rank 0; it is left when the followers are told to leave.
            timeout_s: how long a step may take; the start is given `START_TIMEOUT_S` if that is more.
            on_failure: told on another thread, in one line, why the group cannot go on; should end this process, whose
                main thread may wait for a rank that is gone.
            command: program of a follower; it gets the number of its channel as last argument.
        """
        self._group = group
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._ending = threading.Lock()
        self._is_over = False
        self._is_closed = False
        self._waiting: tuple[str, float, float] | None = None  # what for, since when, and for how long at most
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
        """Tells each follower what to be, rank 1 first."""
        with self.waiting_for("the other ranks to start", START_TIMEOUT_S):
            for channel, assignment in zip(self._processes, assignments, strict=True):
                channel.send(assignment)

    def wait_ready(self) -> None:
        """Returns when all have loaded their part; rank 0 has, by then."""
        with self.waiting_for("the other ranks to load", START_TIMEOUT_S):
            self._all_ready.wait()

    def send(self, message: bytes) -> None:
        """Hands a message to every follower; waits for one that is far behind."""
        for channel in self._processes:
            channel.send_bytes(message)

    @contextlib.contextmanager
    def waiting_for(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """Within it, rank 0 depends on the others: taking longer than `timeout_s` ends the group.

        An error is held back for a moment: if it comes of a follower's end, that is what is to be reported.
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
        """Ends the followers. May be called twice; does not return while `on_failure` ends the process."""
        with self._ending:
            self._is_over = True
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for channel, process in self._processes.items():
            assert process.stdin is not None
            if not self._all_ready.is_set():
                process.stdin.close()  # it may load, or wait for a meeting: it ends on the spot
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(channel.fileno())) as end:
                end.shutdown(socket.SHUT_WR)  # there will be no more plans: they leave the group and exit
        leaving = threading.Thread(target=self._group.leave, daemon=True)  # with a rank that hangs it never ends
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
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._processes[ours] = process
        self._names[ours] = f"rank {rank} (process {process.pid})"
        _log.info("Started %s", self._names[ours])

    def _watch(self) -> None:
        channels = list(self._processes)
        while channels:
            for channel in wait(channels, _TICK_S):
                assert isinstance(channel, Connection)
                try:
                    self._hear(channel, channel.recv())
                except (EOFError, OSError):
                    channels.remove(channel)
                    status = _wait(self._processes[channel])  # nobody else holds its end of the channel
                    self._fail(StepError(f"{self._names[channel]} {_describe(status)}"))
            self._check_clock()

    def _hear(self, channel: Connection, message: EngineError | None) -> None:
        """A follower speaks twice at most: when it is ready, and of what ends it."""
        if message is not None:
            self._fail(type(message)(f"{self._names[channel]}: {message}"))
            return
        self._num_ready += 1
        if self._num_ready == len(self._processes):
            self._all_ready.set()

    def _check_clock(self) -> None:
        waiting = self._waiting  # another thread's
        if waiting is None:
            return
        what, since_s, most_s = waiting
        if time.monotonic() - since_s > most_s:
            which = " or ".join(self._names.values())
            self._fail(StepError(f"rank 0 has waited more than {most_s:g} s for {what}: {which} hangs"))

    def _fail(self, error: EngineError) -> None:
        with self._ending:
            if not self._is_over:
                self._is_over = True
                for process in self._processes.values():
                    process.kill()  # one that is stopped would not notice that we are gone
                self._on_failure(error)


def _wait(process: subprocess.Popen[bytes], timeout_s: float = _STOP_GRACE_S) -> int:
    """The exit status of a process that is ending; one that does not is killed."""
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
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"
