"""The parent of several workers: reserves the ports, starts the workers, replaces those that die, and drains all.

It has the methods of `FrontendApp` (start, wait_serving, drain, stop), so that `chairlift up` can use either. It serves
no requests and does not use gRPC.
"""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Sequence

from chairlift.service.private_folder import PrivateFolder
from frontend.api.ports import GRPC_ADVICE, HTTP_ADVICE, reserve_port, try_ports
from frontend.config import FrontendConfig
from frontend.errors import ConfigError, FrontendError
from frontend.observability.metrics_folder import clear_gauges, note_pid
from frontend.types import WorkerPlace
from frontend.workers.child_process import RestartPauses, describe_end
from frontend.workers.order import WorkerOrder
from frontend.workers.report import News
from frontend.workers.worker_process import WORKER_COMMAND, WorkerProcess

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_SETTLE_S = 5.0  # for a worker to end after its grace period


class WorkerFailed(FrontendError):  # noqa: N818 - reads as the reason it is
    """A worker ended before it listened, and not because of a flag; its error is on stderr."""


class Supervisor:
    """Keeps `config.workers` processes running.

    Args:
        config: the frontend's configuration.
        command: program of a worker; tests replace it.
        first_pause_s: pause before a worker is replaced; doubled, up to 30 s, while its replacements die too.

    Attributes:
        port, http_port: ports of all workers, set by `start`; http_port is None without HTTP.
    """

    def __init__(
        self,
        config: FrontendConfig,
        command: Sequence[str] = WORKER_COMMAND,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._config = config
        self._command = command
        self._first_pause_s = first_pause_s
        self._folder: PrivateFolder | None = None
        self._reserved: list[socket.socket] = []
        self._since = int(time.time())
        self._workers: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.port = 0
        self.http_port: int | None = None

    async def start(self) -> None:
        """Starts all workers and waits until each one listens.

        Raises:
            ConfigError: a flag must be changed; the message is that of the first worker that failed.
            WorkerFailed: a worker ended for another reason.
        """
        config = self._reserve()
        self._folder = PrivateFolder("workers-")
        indices = range(config.workers)
        first = await asyncio.gather(*(self._start_worker(config, index) for index in indices))
        listening = [asyncio.create_task(_wait_listening(index, worker)) for index, worker in enumerate(first)]
        try:
            await asyncio.gather(*listening)
        finally:
            for task in listening:
                task.cancel()
        self._keepers = [asyncio.create_task(self._keep(config, index, worker)) for index, worker in enumerate(first)]
        for keeper in self._keepers:
            keeper.add_done_callback(_log_defect)
        logger.info("%d workers listen on %s:%d", config.workers, config.host, self.port)

    async def wait_serving(self, timeout_s: float | None) -> None:
        """Waits until every worker accepts requests.

        Raises:
            TimeoutError: a worker does not within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            for index in range(self._config.workers):
                while not await self._workers[index].wait_for(News.SERVING):  # noqa: ASYNC110 - it is being replaced
                    await asyncio.sleep(self._first_pause_s)

    async def drain(self, grace_s: float) -> int:
        """Drains all workers; each ends within `grace_s`, or `stop` kills it.

        Returns: number of calls that finished, of all workers that reported it.
        """
        self._stopping.set()
        await asyncio.gather(*self._keepers, return_exceptions=True)  # one that failed must not keep the others running
        running = {index: worker for index, worker in self._workers.items() if worker.status is None}
        for worker in running.values():
            worker.terminate()
        try:
            async with asyncio.timeout(grace_s + _SETTLE_S):
                await asyncio.gather(*(worker.wait_ended() for worker in running.values()))
        except TimeoutError:
            logger.warning("workers have not ended within %g s; killing them", grace_s + _SETTLE_S)
        for index, worker in running.items():
            if worker.status:
                logger.warning("worker %d ended while draining: %s", index, _reason(worker))
        reports = (worker.seen.get(News.DRAINED) for worker in running.values())
        return sum(report.num_drained for report in reports if report is not None)

    async def stop(self) -> None:
        """Ends the remaining workers and releases the ports."""
        self._stopping.set()
        await asyncio.gather(*self._keepers, return_exceptions=True)  # one that failed must not keep the others running
        self.kill()
        await asyncio.gather(*(worker.wait_ended() for worker in self._workers.values()))

    def kill(self) -> None:
        """Kills all workers and removes their files."""
        for worker in self._workers.values():
            worker.kill()
        for reserved in self._reserved:
            reserved.close()
        if self._folder is not None:
            self._folder.remove()

    def _reserve(self) -> FrontendConfig:
        """Reserves the ports; returns the workers' config."""
        config = self._config
        if not config.reuse_port:  # or a second server would get half of the first one's clients
            try_ports(config)
        self._reserved.append(reserve_port(config.host, config.port, GRPC_ADVICE))
        self.port = self._reserved[0].getsockname()[1]
        if config.http:
            host = config.http_host or config.host
            self._reserved.append(reserve_port(host, config.http_port, HTTP_ADVICE))
            self.http_port = self._reserved[1].getsockname()[1]
        return dataclasses.replace(
            config, port=self.port, http_port=self.http_port or config.http_port, reuse_port=True
        )

    async def _start_worker(self, config: FrontendConfig, index: int) -> WorkerProcess:
        assert self._folder is not None
        folder = self._folder.path
        place = WorkerPlace(index, folder, self._since)
        worker = await WorkerProcess.start(WorkerOrder(config, place), self._command)
        self._workers[index] = worker
        try:
            note_pid(folder, index, worker.pid)
        except OSError as error:  # the worker serves nevertheless
            logger.warning("worker %d is missing in process_* metrics: %s", index, error)
        return worker

    async def _keep(self, config: FrontendConfig, index: int, worker: WorkerProcess) -> None:
        """Replaces one worker whenever it ends, until the supervisor stops."""
        assert self._folder is not None
        pauses = RestartPauses(self._first_pause_s)
        started_s = time.monotonic()
        while not await self._stops_first(worker):
            clear_gauges(self._folder.path, index)
            pause_s = pauses.next_s(time.monotonic() - started_s)
            logger.warning("worker %d ended: %s; replacing it in %g s", index, _reason(worker), pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return
            started_s = time.monotonic()
            try:
                worker = await self._start_worker(config, index)
            except OSError as error:  # no memory or process id: retried later
                logger.error("worker %d cannot be started: %s", index, error)

    async def _stops_first(self, worker: WorkerProcess) -> bool:
        """Waits until the worker ends or the supervisor stops; returns whether it stops."""
        ended = asyncio.create_task(worker.wait_ended())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        stopping.cancel()
        return self._stopping.is_set()


async def _wait_listening(index: int, worker: WorkerProcess) -> None:
    if await worker.wait_for(News.LISTENING):
        return
    if (report := worker.seen.get(News.MISCONFIGURED)) is not None:
        raise ConfigError(report.reason)
    raise WorkerFailed(f"worker {index} ended before it listened: {_reason(worker)}")


def _log_defect(keeper: asyncio.Task[None]) -> None:
    if not keeper.cancelled() and (error := keeper.exception()) is not None:
        logger.error("a worker is not replaced any more", exc_info=error)


def _reason(worker: WorkerProcess) -> str:
    if (report := worker.seen.get(News.MISCONFIGURED)) is not None:
        return report.reason
    return describe_end(worker.status or 0)
