"""A worker seen from its parent: a subprocess that receives an order and sends reports."""

import asyncio
import pickle
import sys
from collections.abc import Sequence

from frontend.workers.child_process import kill_group, terminate
from frontend.workers.order import WorkerOrder
from frontend.workers.report import News, Report, parse

WORKER_COMMAND = (sys.executable, "-P", "-m", "frontend.workers.worker")


class WorkerProcess:
    """One worker process.

    Attributes:
        pid: its process id.
        seen: its reports, by event.
        status: its return code; None until it has ended.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())
        self.pid = process.pid
        self.seen: dict[News, Report] = {}
        self.status: int | None = None

    @classmethod
    async def start(cls, order: WorkerOrder, command: Sequence[str] = WORKER_COMMAND) -> "WorkerProcess":
        """Starts a worker in a new interpreter, because gRPC does not survive a fork."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent alone
        )
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(order))
        return cls(process)

    async def wait_for(self, news: News) -> bool:
        """Waits until the worker reports this event or ends; returns whether it was reported."""
        async with self._changed:
            await self._changed.wait_for(lambda: news in self.seen or self.status is not None)
        return news in self.seen

    async def wait_ended(self) -> int:
        """Waits until the worker has ended; returns its return code."""
        await asyncio.shield(self._reader)
        assert self.status is not None
        return self.status

    def terminate(self) -> None:
        """Starts the worker's drain."""
        terminate(self._process)

    def kill(self) -> None:
        """Kills the worker."""
        if self.status is None:
            kill_group(self.pid)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            report = parse(line)
            await self._note(report)
        status = await self._process.wait()
        async with self._changed:
            self.status = status
            self._changed.notify_all()

    async def _note(self, report: Report) -> None:
        async with self._changed:
            self.seen[report.news] = report
            self._changed.notify_all()
