"""`chairlift-frontend`: runs one frontend process, or several workers, until SIGTERM or SIGINT, which drain it."""

import chairlift.service.silent_grpc  # noqa: F401 - before grpc

# isort: split
import asyncio
import os
import sys
from collections.abc import Sequence

from chairlift.service.logs import announce, log_to_stderr, report_error
from chairlift.service.signals import StopSignals
from chairlift.service.standard_streams import open_closed_streams
from chairlift.service.variables import warn_of_unknown_variables
from frontend.config import FrontendConfig, parse_arguments
from frontend.errors import ConfigError
from frontend.garbage import collect_when_idle
from frontend.workers.run import run_workers
from frontend.workers.supervisor import WorkerFailed

_PROGRAM = "chairlift-frontend"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the frontend; returns the exit status."""
    open_closed_streams()
    config = parse_arguments(sys.argv[1:] if argv is None else argv)
    log_to_stderr(_PROGRAM, config.log_level, config.log_format)
    warn_of_unknown_variables()
    os.setpriority(os.PRIO_PROCESS, 0, max(config.nice, os.getpriority(os.PRIO_PROCESS, 0)))
    try:
        if config.workers > 1:
            num_drained = run_workers(config)
        else:
            num_drained = _run(config)
    except (ConfigError, WorkerFailed) as error:
        report_error(_PROGRAM, error, config.log_format)
        return 2 if isinstance(error, ConfigError) else 1
    announce(f"drained {num_drained}", config.log_format)
    return 0


def _run(config: FrontendConfig) -> int:
    """Runs one frontend process until a signal; returns the number of calls that finished while draining."""
    from frontend.app import FrontendApp, loop_factory  # here, because the parent of workers must not import gRPC

    async def serve() -> int:
        app = FrontendApp(config, warm_up=True)
        signals = StopSignals(count_open=lambda: app.calls.num_active)
        signals.watch()
        try:
            await app.start()
            collect_when_idle(app.calls)
            await signals.stop.wait()
            return await app.drain(config.shutdown_timeout_s)
        finally:
            await app.stop()

    with asyncio.Runner(loop_factory=loop_factory(use_uvloop=config.uvloop)) as runner:
        return runner.run(serve())


if __name__ == "__main__":
    sys.exit(main())
