"""The other processes of a group, monitored by the one that started them: rank 0, or a machine without rank 0.

If one rank of a group ends, the others would hang in their next collective. So when a rank ends, or a step takes too
long, all of them are ended, with one error that says which rank was the first.
"""

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from chairlift.service.private_folder import PrivateFolder
from engine.errors import EngineError, StepError
from engine.parallel.nodes import NodeLink
from engine.parallel.peer import News, Peer
from engine.parallel.rank_process import FOLLOWER_COMMAND, RankProcess
from engine.parallel.remote_node import RemoteNode

START_TIMEOUT_S = 120.0
"""Shortest timeout for each phase of the start: importing libraries, connecting, and loading after rank 0."""

SETTLE_S = 2.0
"""How long a failed step waits for the end of a process that would explain it."""

_TICK_S = 1.0  # interval of the timeout check
_STOP_GRACE_S = 5.0  # for ranks to leave their group

OnFailure = Callable[[EngineError], None]

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
            command: see `RankProcess`.
        Raises: ConfigError: a process cannot be started; those that were are killed, and the links closed.
        """
        self._on_stopping = on_stopping
        self._leave = leave
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._owner = owner
        self._ending = threading.Lock()
        self._has_ended = False
        self._is_closed = False
        self._waiting: tuple[str, float, float] | None = None  # for what, since when, timeout
        self._num_ready = 0
        self._all_ready = threading.Event()
        self._folder = PrivateFolder("ranks-")
        self.meeting_folder = self._folder.path
        nodes = [RemoteNode(link) for link in links]
        self._processes: list[RankProcess] = []
        try:
            for rank in ranks:
                self._processes.append(RankProcess(rank, command))
        except BaseException:
            for process in self._processes:
                process.kill()
                process.wait(_STOP_GRACE_S)
                process.close()
            for node in nodes:
                node.close()
            self._folder.remove()
            raise
        self._peers: list[Peer] = [*self._processes, *nodes]
        atexit.register(self.close)
        self._watch_thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watch_thread.start()
        # Python 3.12 starts no thread once it calls what `atexit` registered.
        self._may_leave = threading.Event()
        self._leaving = threading.Thread(target=self._leave_when_asked, name="rank-leave", daemon=True)
        self._leaving.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of the ranks."""
        return [process.pid for process in self._processes]

    def assign(self, assignments: Sequence[object]) -> None:
        """Sends each rank that was started its assignment, in the order of the ranks."""
        with self.waiting_for("the other ranks to start", START_TIMEOUT_S):
            for process, assignment in zip(self._processes, assignments, strict=True):
                process.assign(assignment)

    def wait_ready(self, *, is_timed: bool = True) -> None:
        """Waits until all have loaded their shard; with a timeout if called when rank 0 has loaded its own."""
        with self.waiting_for("the other ranks to load", START_TIMEOUT_S) if is_timed else contextlib.nullcontext():
            self._all_ready.wait()

    def send(self, message: bytes) -> None:
        """Sends a message to every rank and machine; blocks while one is far behind. Raises: OSError: one is gone."""
        for peer in self._peers:
            peer.send_bytes(message)

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
        for peer in self._peers:
            peer.ask_to_leave(is_ready=self._all_ready.is_set())
        until_s = time.monotonic() + _STOP_GRACE_S
        self._may_leave.set()
        self._leaving.join(_STOP_GRACE_S)
        for process in self._processes:
            process.wait(max(0.0, until_s - time.monotonic()))
        self._watch_thread.join(_STOP_GRACE_S)  # a machine may not answer
        for peer in self._peers:
            peer.close()
        self._folder.remove()

    def _leave_when_asked(self) -> None:
        """Leaves the group in `close`; hangs if a rank hangs."""
        self._may_leave.wait()
        self._leave()

    def _watch(self) -> None:
        peers: list[Any] = list(self._peers)  # the types of `wait` are sockets and pipes, not all that has a `fileno`
        while peers:
            ready: list[Any] = wait(peers, _TICK_S)
            for peer in ready:
                try:
                    self._handle(peer, peer.receive())
                except (EOFError, OSError):
                    peers.remove(peer)
                    self._fail(StepError(f"{peer.name} {peer.describe_end()}"))
            self._check_clock()

    def _handle(self, peer: Peer, report: News | EngineError) -> None:
        match report:
            case News.READY:
                self._num_ready += 1
                if self._num_ready == len(self._peers):
                    self._all_ready.set()
            case News.STOPPING:
                _log.info("%s was asked to stop: draining", peer.name)
                self._on_stopping()
            case EngineError():
                error = type(report)(f"{peer.name}: {report}")
                for note in getattr(report, "__notes__", ()):
                    error.add_note(f"{peer.name}: {note}")
                self._fail(error)

    def _check_clock(self) -> None:
        waiting = self._waiting  # read once: another thread writes it
        if waiting is None:
            return
        what, since_s, most_s = waiting
        if time.monotonic() - since_s > most_s:
            which = " or ".join(peer.name for peer in self._peers)
            self._fail(StepError(f"{self._owner} has waited more than {most_s:g} s for {what}: {which} hangs"))

    def _fail(self, error: EngineError) -> None:
        with self._ending:
            if not self._has_ended:
                self._has_ended = True
                for process in self._processes:
                    process.kill()
                self._folder.remove()  # `on_failure` may end this process at once
                self._on_failure(error)
