"""`chairlift-engine`: loads a model and serves it to frontends.

Exit status: 0 after a drain, 1 after a failure (with its traceback; one line if the device has failed), 2 when a flag,
the model or the machine must be changed first (one line on stderr says which and how).
"""

import chairlift.service.silent_grpc  # noqa: F401 - before grpc

# isort: split
import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import grpc.aio

from chairlift.service.logs import log_to_stderr, report_error, terminal
from chairlift.service.operating_system import UnsupportedSystemError, check_operating_system
from chairlift.service.process_limits import NUM_THREADS, ProcessLimitError, check_process_limits
from chairlift.service.standard_streams import open_closed_streams
from chairlift.service.variables import warn_of_unknown_variables
from engine.config import EngineConfig, parse_config
from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError, IntegrityError, StepError
from engine.model.model_folder import check_folder, local_model
from engine.serving.coalescing import CoalescePolicy
from engine.serving.engine import STOP_GRACE_S, Engine
from engine.serving.io_thread import IoThread
from engine.serving.listener import Listener
from engine.serving.server import EngineService
from engine.serving.step_log import StepLog
from engine.serving.watchdog import Watchdog
from engine.shutdown import ShutdownSignals, StoppedWhileLoading
from engine.startup.machine import usable_cpus
from engine.startup.progress import StartupProgress
from engine.startup.service_manager import notify_ready
from engine.tls import Handshakes, check_exposure, server_credentials

STALL_TIMEOUT_S = 30.0
"""How long an engine that sees what is done within a step may get nothing done before it ends, if --step-timeout is
longer.
"""

_PROGRAM = "chairlift-engine"

_log = logging.getLogger("engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the engine until it is stopped; returns the exit status."""
    began_at_s = time.monotonic()
    open_closed_streams()
    config = parse_config(sys.argv[1:] if argv is None else argv)
    log_to_stderr(_PROGRAM, config.log_level, config.log_format)
    warn_of_unknown_variables()
    try:
        check_operating_system()
        run = _run_node if config.layout.num_nodes > 1 and config.node_rank > 0 else _run
        run(config, began_at_s)
    except (ConfigError, CheckpointError, UnsupportedSystemError) as error:
        report_error(_PROGRAM, error, config.log_format)
        return 2
    except StoppedWhileLoading:
        _log.info("stopped while loading")
    except DeviceError as error:
        report_error(_PROGRAM, error, config.log_format)
        os._exit(1)  # torch would free what it has on the device, and fail at that, in many lines
    except IntegrityError as error:
        report_error(_PROGRAM, error, config.log_format)
        return 1
    except StepError:
        return 1
    return 0


def _run_node(config: EngineConfig, began_at_s: float) -> None:
    """Runs the ranks of a machine that serves no requests itself."""
    signals = ShutdownSignals(config.shutdown_timeout_s)

    def end(error: EngineError) -> None:
        if not signals.ends_load:
            _report(error, config)
            os._exit(_status_of(error))

    if config.exit_on_stdin_close:
        signals.watch_stdin()
    shown = terminal()
    startup = StartupProgress(
        show=shown.show if shown is not None else None, began_at_s=began_at_s, check=signals.check
    )
    with startup.watched(), signals.loading():
        _check_model(config)
        startup.begin("imports", "loading libraries")
        from engine.startup.node import start_node

        node = start_node(config, startup, end)
    signals.control(node)
    _log.info("node %d of %d, in the group of %s", config.node_rank, config.nnodes, config.master_addr)
    try:
        node.run()
    except StepError as error:
        report_error(_PROGRAM, error, config.log_format)
        raise


def _check_model(config: EngineConfig) -> None:
    """Refuses a model on this machine that cannot be served, before libraries are imported for seconds."""
    is_dummy = config.load_format == "dummy"
    if (folder := local_model(config.model, is_dummy=is_dummy)) is not None:
        check_folder(folder, is_dummy=is_dummy, model_impl=config.model_impl, layout=config.layout)


def _run(config: EngineConfig, began_at_s: float) -> None:
    check_exposure(config)
    handshakes = Handshakes()
    credentials = server_credentials(config, handshakes)
    try:
        check_process_limits(NUM_THREADS + 2 * usable_cpus())  # torch's and our own kernels'
    except ProcessLimitError as error:
        raise ConfigError(str(error)) from None
    signals = ShutdownSignals(config.shutdown_timeout_s)
    if config.exit_on_stdin_close:
        signals.watch_stdin()
    step_log = StepLog(config.step_log) if config.step_log is not None else None
    service, add_services = _services(config)
    io = IoThread(lambda: Listener(service, config.address, credentials, [handshakes], add_services), signals.stop)
    end = _ending(service, io, signals, config)
    try:
        io.start()
        _log.info("listening on %s, loading", io.address)
        shown = terminal()
        startup = StartupProgress(
            lambda detail: io.call(service.set_loading, detail),
            shown.show if shown is not None else None,
            began_at_s=began_at_s,
            check=signals.check,
        )
        with startup.watched(), signals.loading():
            _check_model(config)
            # Imports torch: seconds that a bad flag, a taken port or an unsupported model should not cost.
            startup.begin("imports", "loading libraries")
            from engine.startup.build import build_engine

            parts = build_engine(config, startup, end, signals.drain)
        gc.collect()
        gc.freeze()  # what is there now stays: later collections need not walk it
        notify_ready(service.instance_id)  # before a frontend can attach: a supervisor knows every instance that serves
        engine = Engine(
            service,
            io,
            parts,
            step_log,
            coalescing=CoalescePolicy(config.coalesce_ms / 1000),
            integrity_check_interval_s=config.integrity_check_interval_s,
        )
        signals.control(engine)
        _log.info("ready in %s", startup.end())
        _log.info("serving on %s, model %s", io.address, parts.info.model)
        with _watchdog(engine, config, end):
            engine.run()
    except StoppedWhileLoading:
        if io.has_failed:
            raise StepError("the IO thread failed") from None
        raise
    finally:
        io.stop(STOP_GRACE_S)
        if step_log is not None:
            step_log.close()


def _services(config: EngineConfig) -> tuple[EngineService, Callable[[grpc.aio.Server], None]]:
    """Returns the engine's own service, and what adds others to its server.

    Raises: ConfigError: the package of another API is not installed.
    """
    if config.api == "chairlift":
        return EngineService(config.log_stats_interval_s), lambda _: None
    try:
        from engine.serving.vllm.service import serve_vllm
    except ImportError as error:
        raise ConfigError(
            f"--api vllm needs the package smg-grpc-proto ({error}): install chairlift[engines]"
        ) from None
    return serve_vllm(config.log_stats_interval_s)


def _watchdog(engine: Engine, config: EngineConfig, end: Callable[[EngineError], None]) -> Watchdog:
    thread_id = threading.get_ident()
    if engine.shows_progress and config.step_timeout_s > STALL_TIMEOUT_S:
        reason = "within a step nothing is done any more"
        return Watchdog(engine.mark, STALL_TIMEOUT_S, end, thread_id=thread_id, reason=reason)
    return Watchdog(engine.mark, config.step_timeout_s, end, thread_id=thread_id)


def _ending(
    service: EngineService, io: IoThread, signals: ShutdownSignals, config: EngineConfig
) -> Callable[[EngineError], None]:
    """Returns the handler of a failed rank or a hanging device, for which the main thread may wait without end.

    It does nothing while a signal ends the load: the connections of this rank have gone, so the others fail.
    """

    def end(error: EngineError) -> None:
        if signals.ends_load:
            return
        _report(error, config)
        with contextlib.suppress(RuntimeError):  # the event loop is gone too
            io.call(service.fail, str(error))
        io.stop(STOP_GRACE_S)
        os._exit(_status_of(error))

    return end


def _report(error: EngineError, config: EngineConfig) -> None:
    """Writes the error to stderr in one line, after the traceback if it is an internal error of another rank."""
    for note in getattr(error, "__notes__", ()):
        _log.error("%s", note)
    report_error(_PROGRAM, error, config.log_format)


def _status_of(error: EngineError) -> int:
    return 2 if isinstance(error, ConfigError | CheckpointError) else 1


if __name__ == "__main__":
    sys.exit(main())
