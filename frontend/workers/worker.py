"""`python -m frontend.workers.worker`: one of several frontend processes, started by `WorkerProcess` alone."""

import asyncio
import os
import pickle
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

from chairlift.service.logs import log_to_stderr
from chairlift.service.private_folder import hold_folder
from frontend.app import FrontendApp, loop_factory
from frontend.errors import ConfigError
from frontend.garbage import collect_when_idle
from frontend.workers.order import WorkerOrder
from frontend.workers.report import News, Report, send

_ENGINE_PATIENCE_S = 5.0
"""Seconds that a worker waits for an engine before it opens its ports; without one it answers UNAVAILABLE."""


def main() -> int:
    """Serves until SIGTERM or until the parent ends; returns the exit status."""
    order: WorkerOrder = pickle.load(sys.stdin.buffer)
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output is not a report
    log_to_stderr("chairlift-frontend", order.config.log_level, order.config.log_format, worker=order.place.index)
    hold_folder(order.place.metrics_folder)  # a worker drains after its parent was killed, beside the next parent
    try:
        with asyncio.Runner(loop_factory=loop_factory(use_uvloop=order.config.uvloop)) as runner:
            runner.run(_serve(order, reports))
    except ConfigError as error:
        send(Report(News.MISCONFIGURED, reason=str(error)), reports)
        return 2
    return 0


async def _serve(order: WorkerOrder, reports: BinaryIO) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    app = FrontendApp(order.config, order.place, warm_up=True)
    watches = [asyncio.create_task(_watch_parent(stop))]
    try:
        app.engines.start()
        with suppress(TimeoutError):  # open ports get their share of new connections, while other workers can answer
            await app.wait_serving(_ENGINE_PATIENCE_S)
        await app.start()
        collect_when_idle(app.calls)
        send(Report(News.LISTENING), reports)
        watches.append(asyncio.create_task(_report_serving(app, reports)))
        await stop.wait()
        num_drained = await app.drain(order.config.shutdown_timeout_s)
        with suppress(BrokenPipeError):  # the parent has ended
            send(Report(News.DRAINED, num_drained=num_drained), reports)
    finally:
        for watch in watches:
            watch.cancel()
        await app.stop()


async def _watch_parent(stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    await reader.read()
    stop.set()


async def _report_serving(app: FrontendApp, reports: BinaryIO) -> None:
    await app.wait_serving(None)
    send(Report(News.SERVING), reports)


if __name__ == "__main__":
    sys.exit(main())
