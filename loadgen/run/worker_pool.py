"""The worker processes of one run, and their messages so far."""

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self, TypeVar

from loadgen.errors import TargetError
from loadgen.run.worker import Done, Failed, NewError, Stop, WorkerPlan, work

_END_TIMEOUT_S = 10.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_GONE = (EOFError, OSError)  # the end of a pipe; OSError where it comes in the middle of a message
Message = TypeVar("Message")


@dataclass(slots=True)
class WorkerHandle:
    """One worker.

    Attributes:
        number: of the worker.
        process, connection: the process and the pipe to it.
        errors: error texts; its requests have indices into this list.
        done: its last message; None before.
        exit_code: of a process that ended without that message; otherwise None.
        died_ns: when that was detected, on CLOCK_MONOTONIC.
    """

    number: int
    process: BaseProcess
    connection: Connection
    errors: list[str] = field(default_factory=list)
    done: Done | None = None
    exit_code: int | None = None
    died_ns: int = 0

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.done is None and self.exit_code is None


class WorkerPool:
    """Starts one process per plan; leaving the `with` block ends those that still run.

    Args:
        plans: one per worker.

    Attributes:
        handles: in the order of the plans.
    """

    def __init__(self, plans: Sequence[WorkerPlan]) -> None:
        self._plans = plans
        self.handles: list[WorkerHandle] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        try:
            with _signals_are_blocked():
                for plan in self._plans:
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=work, args=(plan, theirs), name=f"worker-{plan.worker}", daemon=True
                    )
                    process.start()
                    theirs.close()
                    self.handles.append(WorkerHandle(plan.worker, process, ours))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for handle in self.handles:
                handle.process.kill()
        self._end()

    def send(self, message: object) -> None:
        """Sends a message to every worker that runs."""
        for handle in self.handles:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                handle.connection.send(message)

    def replies(self, kind: type[Message]) -> list[Message]:
        """Waits for one message from each worker before the start.

        Raises:
            LoadgenError: a worker reports that it cannot run.
            TargetError: a worker died.
        """
        replies: dict[int, Message] = {}
        while len(replies) < len(self.handles):
            for handle in self._with_messages(None, [each for each in self.handles if each.number not in replies]):
                try:
                    message = handle.connection.recv()
                except _GONE:
                    handle.process.join(_END_TIMEOUT_S)
                    raise TargetError(
                        f"worker {handle.number} died with exit code {handle.process.exitcode} before the start: "
                        "what it printed says why"
                    ) from None
                if isinstance(message, Failed):
                    raise message.error
                assert isinstance(message, kind), message
                replies[handle.number] = message
        return [replies[handle.number] for handle in self.handles]

    def listen(self, timeout_s: float) -> None:
        """Receives messages of the workers, and detects workers that have died."""
        running = [handle for handle in self.handles if handle.is_running]
        for handle in self._with_messages(timeout_s, running):
            try:
                message: Any = handle.connection.recv()
            except _GONE:
                handle.process.join(_END_TIMEOUT_S)
                handle.exit_code = handle.process.exitcode if handle.process.exitcode is not None else -1
                handle.died_ns = time.monotonic_ns()
                continue
            if isinstance(message, NewError):
                handle.errors.append(message.text)
            else:
                assert isinstance(message, Done), message
                handle.done = message

    @property
    def is_running(self) -> bool:
        """Whether any worker runs."""
        return any(handle.is_running for handle in self.handles)

    def stop(self) -> None:
        """Tells the workers to cancel their requests, and waits for their last messages.

        Workers that do not answer are killed, and count as dead.
        """
        self.send(Stop())
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while self.is_running and time.monotonic() < deadline_s:
            self.listen(0.1)
        for handle in self.handles:
            if handle.is_running:
                handle.process.kill()
        while self.is_running:
            self.listen(0.1)

    def _with_messages(self, timeout_s: float | None, handles: Sequence[WorkerHandle]) -> Iterator[WorkerHandle]:
        """Yields the workers with something to receive: a message, or the end of the pipe."""
        by_connection = {handle.connection: handle for handle in handles}
        for connection in wait(list(by_connection), timeout_s):
            yield by_connection[connection]  # type: ignore[index]

    def _end(self) -> None:
        for handle in self.handles:
            handle.connection.close()  # ends a worker that still waits for a message
        for handle in self.handles:
            handle.process.join(_END_TIMEOUT_S)
            if handle.process.is_alive():
                handle.process.kill()
                handle.process.join()


@contextlib.contextmanager
def _signals_are_blocked() -> Iterator[None]:
    """Processes that are started inside ignore Ctrl-C and SIGTERM, also while they import: the pool ends them."""
    resource_tracker.ensure_running()  # it unblocks signals when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class CtrlC:
    """Inside its `with` block Ctrl-C and SIGTERM set `received`; a second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> Self:
        is_main_thread = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._receive) for number in _STOPPING if is_main_thread}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:  # noqa: ARG002 - the signature is the system's
        self.received = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
