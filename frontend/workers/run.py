"""Runs several workers until a signal."""

import asyncio

from chairlift.service.signals import StopSignals
from frontend.config import FrontendConfig
from frontend.workers.supervisor import Supervisor


def run_workers(config: FrontendConfig) -> int:
    """Serves until SIGTERM or SIGINT, which drain all workers; a second signal ends them at once.

    Returns: the number of calls that finished while draining.

    Raises:
        ConfigError: a flag must be changed.
        WorkerFailed: a worker cannot run for another reason.
    """
    return asyncio.run(_run(Supervisor(config), config.shutdown_timeout_s))


async def _run(supervisor: Supervisor, grace_s: float) -> int:
    signals = StopSignals(clean_up=supervisor.kill)
    signals.watch()
    try:
        await supervisor.start()
        await signals.stop.wait()
        return await supervisor.drain(grace_s)
    finally:
        await supervisor.stop()
