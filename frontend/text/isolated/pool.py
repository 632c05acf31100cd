"""Pool of processes for one kind of job: started on demand, reused, replaced when they end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from frontend.errors import WorkerUnavailable
from frontend.text.isolated.process import IsolatedProcess, JobLimits
from frontend.text.isolated.worker import Frame

logger = logging.getLogger(__name__)

_RETRY_S = 1.0

Hello = Callable[[], Awaitable[bytes]]
"""Makes the first frame for a process."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A process and the key it was started for."""

    process: IsolatedProcess
    key: bytes


_Use = Callable[[_Worker], Awaitable[Frame]]


async def _nothing(_: _Worker) -> Frame:
    return {}


class PoolStopped(Exception):  # noqa: N818
    """The pool has stopped; all its jobs fail."""


class ProcessPool:
    """Runs one job per process at a time. The first job starts the first process.

    A job that has started is finished, within its limits, even if its request has ended; the process is then free for
    the next job.

    Args:
        module: module that the processes run; it calls `worker.serve`.
        limits: limits of each job.
        num_processes: maximum number; one job may occupy a process for the whole time limit.
    """

    def __init__(self, module: str, limits: JobLimits, num_processes: int) -> None:
        self.limits = limits
        self._module = module
        self._free = asyncio.Semaphore(num_processes)
        self._idle: list[_Worker] = []
        self._running: set[asyncio.Task[Frame | Exception]] = set()
        self._has_stopped = False
        self._hello: tuple[bytes, bytes] | None = None  # the latest key and its first frame

    async def run(self, key: bytes, hello: Hello, job: bytes, *, on_begin: Callable[[], None] | None = None) -> Frame:
        """Runs a job and returns its answer.

        Args:
            key: identifies the first frame that the process was started with.
            hello: makes that first frame; called once per key.
            job: an encoded frame.
            on_begin: called when the job starts.

        Raises:
            LimitExceeded, StartRefused: see `IsolatedProcess`.
            WorkerUnavailable: no process can be started now.
            PoolStopped: `stop` was called.
        """
        return await self._run_in_process(lambda worker: worker.process.ask(job), key, hello, on_begin)

    async def start(self, key: bytes, hello: Hello) -> None:
        """Starts a process before the first job, unless one is idle.

        Args:
            key, hello: see `run`.

        Raises:
            See `run`.
        """
        await self._run_in_process(_nothing, key, hello, None)

    async def stop(self) -> None:
        """Stops all processes; waiting jobs fail."""
        self._has_stopped = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._idle:
            await self._idle.pop().process.stop()

    async def _run_in_process(self, use: _Use, key: bytes, hello: Hello, on_begin: Callable[[], None] | None) -> Frame:
        await self._free.acquire()
        if self._has_stopped:
            self._free.release()
            raise PoolStopped
        if on_begin is not None:
            on_begin()
        task = asyncio.create_task(self._run(use, key, hello))
        self._running.add(task)
        task.add_done_callback(self._end)
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `stop`, not because this request was cancelled
                raise PoolStopped from None
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _end(self, task: asyncio.Task[Frame | Exception]) -> None:
        self._running.discard(task)
        self._free.release()

    async def _run(self, use: _Use, key: bytes, hello: Hello) -> Frame | Exception:
        """Returns the answer or the error; an exception of the task might never be retrieved."""
        try:
            worker = await self._worker(key, hello)
            try:
                return await use(worker)
            finally:
                if worker.process.is_alive:
                    self._idle.append(worker)
                else:
                    await worker.process.stop()  # closes its pipes
        except Exception as error:
            return error

    async def _worker(self, key: bytes, hello: Hello) -> _Worker:
        """Returns a process for this key: an idle one, or a new one that replaces one for another key."""
        while self._idle:
            worker = self._idle.pop()
            if worker.key == key and worker.process.is_alive:
                return worker
            await worker.process.stop()
        if self._hello is None or self._hello[0] != key:
            self._hello = key, await hello()
        try:
            return _Worker(await IsolatedProcess.start(self._module, self._hello[1], self.limits), key)
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning("cannot start %s: %s", self._module, error or type(error).__name__)
            raise WorkerUnavailable(
                "this server cannot start the process that it needs for this request", retry_after_s=_RETRY_S
            ) from error
