"""Pool of processes for one kind of job: started on demand, reused, replaced when they end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from frontend.text.isolated.process import IsolatedProcess, JobLimits
from frontend.text.isolated.worker import Frame

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

    A job that has begun is finished, within its limits, even if its request has ended: its process is then free
    for the next one.

    Args:
        module: what the processes run; it calls `worker.serve`.
        limits: of each job.
        num_processes: at most; one may be held up for the whole time limit.
    """

    def __init__(self, module: str, limits: JobLimits, num_processes: int) -> None:
        self.limits = limits
        self._module = module
        self._seats = asyncio.Semaphore(num_processes)
        self._idle: list[_Worker] = []
        self._running: set[asyncio.Task[Frame | Exception]] = set()
        self._has_stopped = False
        self._hello: tuple[bytes, bytes] | None = None  # of one key, for its next process

    async def run(self, key: bytes, hello: Hello, job: bytes, *, on_begin: Callable[[], None] | None = None) -> Frame:
        """The answer to a job.

        Args:
            key: what the process must have been started for.
            hello: makes the first frame for that; called once per key.
            job: a frame of JSON.
            on_begin: called when a process is free for it.

        Raises:
            LimitExceeded, StartRefused: see `IsolatedProcess`.
            OSError, EOFError, TimeoutError: no process can be started.
            PoolStopped: `stop` was called.
        """
        return await self._seated(lambda worker: worker.process.ask(job), key, hello, on_begin)

    async def start(self, key: bytes, hello: Hello) -> None:
        """Starts a process ahead of the first job, unless there is one.

        Args:
            key, hello: see `run`.

        Raises:
            as `run`.
        """
        await self._seated(_nothing, key, hello, None)

    async def stop(self) -> None:
        """Stops all processes; waiting jobs fail."""
        self._has_stopped = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._idle:
            await self._idle.pop().process.stop()

    async def _seated(self, use: _Use, key: bytes, hello: Hello, on_begin: Callable[[], None] | None) -> Frame:
        await self._seats.acquire()
        if self._has_stopped:
            self._seats.release()
            raise PoolStopped
        if on_begin is not None:
            on_begin()
        task = asyncio.create_task(self._run(use, key, hello))
        self._running.add(task)
        task.add_done_callback(self._end)
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # not this request was: all are
                raise PoolStopped from None
            raise
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _end(self, task: asyncio.Task[Frame | Exception]) -> None:
        self._running.discard(task)
        self._seats.release()

    async def _run(self, use: _Use, key: bytes, hello: Hello) -> Frame | Exception:
        """Returns the answer or the error: an exception might never be retrieved."""
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
        return _Worker(await IsolatedProcess.start(self._module, self._hello[1], self.limits), key)
