"""The processes of one kind of job: started when they are needed, kept for the next job, replaced when they end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from frontend.isolated.process import IsolatedProcess, JobLimits
from frontend.isolated.worker import Frame

Hello = Callable[[], Awaitable[bytes]]
"""Makes the first frame for a process."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A process and what it was started for."""

    process: IsolatedProcess
    key: bytes


class ProcessPool:
    """Runs jobs, each in a process that does nothing else meanwhile. Starts none before the first job.

    A job that has begun is finished, within its limits, even if nobody waits for it any more: its process is then free
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
            asyncio.CancelledError: this was, or `stop` was called.
        """
        await self._seats.acquire()
        if on_begin is not None:
            on_begin()
        task = asyncio.create_task(self._run(key, hello, job))
        self._running.add(task)
        task.add_done_callback(self._end)
        outcome = await asyncio.shield(task)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def stop(self) -> None:
        """Ends all processes; whoever waits for one is cancelled."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        while self._idle:
            await self._idle.pop().process.stop()

    def _end(self, task: asyncio.Task[Frame | Exception]) -> None:
        self._running.discard(task)
        self._seats.release()

    async def _run(self, key: bytes, hello: Hello, job: bytes) -> Frame | Exception:
        """The answer, or why there is none: nobody may be there to catch it."""
        try:
            worker = await self._worker(key, hello)
            try:
                return await worker.process.ask(job)
            finally:
                if worker.process.is_alive:
                    self._idle.append(worker)
        except Exception as error:
            return error

    async def _worker(self, key: bytes, hello: Hello) -> _Worker:
        """A process for this key: an idle one, or a new one in the place of one for another key."""
        while self._idle:
            worker = self._idle.pop()
            if worker.key == key and worker.process.is_alive:
                return worker
            await worker.process.stop()
        if self._hello is None or self._hello[0] != key:
            self._hello = key, await hello()
        return _Worker(await IsolatedProcess.start(self._module, self._hello[1], self.limits), key)
