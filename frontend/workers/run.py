"""Several workers from the command line, until a signal."""

import asyncio
import os
import signal

from frontend.config import FrontendConfig
from frontend.workers.supervisor import Supervisor


def run_workers(config: FrontendConfig) -> int:
    """Serves until SIGTERM or SIGINT, which drain all workers; a second one ends them at once.

    Returns: the number of calls that finished while draining.

    Raises:
        ConfigError: a flag must be changed.
        WorkerFailed: a worker cannot run for another reason.
    """
    return asyncio.run(_run(Supervisor(config), config.shutdown_timeout_s))


async def _run(supervisor: Supervisor, grace_s: float) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        if stop.is_set():
            supervisor.kill()
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    try:
        await supervisor.start()
        await stop.wait()
        return await supervisor.drain(grace_s)
    finally:
        await supervisor.stop()
