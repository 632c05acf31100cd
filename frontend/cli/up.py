"""`chairlift up`: runs a frontend, or several workers, and an engine together.

They communicate over a unix socket in a private folder. Flags that the frontend does not know are passed to the engine.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from chairlift import GenerationError
from chairlift.service.flag_kinds import switch, text
from chairlift.service.flags import FlagError, FlagParser, add_flags, config_from, flag
from chairlift.service.logs import TEXT, announce, discard_stdout, log_to_stderr, report_error
from chairlift.service.operating_system import UnsupportedSystemError, check_operating_system
from chairlift.service.private_folder import PrivateFolder
from chairlift.service.signals import StopSignals
from frontend.access.api_keys import load_keys
from frontend.app import FrontendApp, loop_factory
from frontend.cli.engine_process import EngineProcess
from frontend.cli.error_line import error_line
from frontend.cli.smoke_test import run_smoke_test
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.garbage import collect_when_idle
from frontend.workers.supervisor import Supervisor, WorkerFailed

ENGINE_COMMAND = (sys.executable, "-P", "-m", "engine")  # -P: ignore a folder named engine here
_MAX_SOCKET_PATH = 100  # the kernel allows 107 bytes
_LINK_LOGGER = "frontend.routing.connection"


def main(argv: Sequence[str], engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Runs the pair until a signal; returns 0 after a drain, 2 when a flag or the model must be changed.

    Args:
        argv: flags of frontend and engine.
        engine_command: program that runs the engine; tests replace it.
    """
    parser = _parser()
    arguments, engine_flags = parser.parse_known_args(argv)
    if arguments.engine is not None:
        parser.error("--engine: `up` starts its own engine; chairlift-frontend connects to others")
    environ = {name: value for name, value in os.environ.items() if name != "CHAIRLIFT_ENGINE"}
    try:
        own = config_from(arguments, _UpConfig, environ)
        config = config_from(arguments, FrontendConfig, environ, error=ConfigError)
        if own.smoke_test and config.tls_cert is not None:
            raise FlagError("--smoke-test does not support TLS: add --no-smoke-test, or omit --tls-cert")
    except FlagError as error:
        parser.error(str(error))
    if own.model is not None:
        engine_flags += ["--model", own.model]
    log_to_stderr("chairlift-frontend", config.log_level, config.log_format)
    logging.getLogger(_LINK_LOGGER).setLevel(logging.WARNING)  # until it serves; `up` announces that itself
    try:
        check_operating_system()
        with _socket_folder() as folder, asyncio.Runner(loop_factory=loop_factory(use_uvloop=config.uvloop)) as runner:
            pair = Pair(config, [*engine_command, *engine_flags], folder)
            return runner.run(pair.run(with_smoke_test=own.smoke_test))
    except (ConfigError, UnsupportedSystemError, WorkerFailed) as error:
        report_error("chairlift up", error, config.log_format)
        return 1 if isinstance(error, WorkerFailed) else 2
    except KeyboardInterrupt:  # before the handlers were installed
        return 130


@dataclasses.dataclass(frozen=True, slots=True)
class _UpConfig:
    """The flags that are neither the frontend's nor only the engine's."""

    model: str | None = flag(
        None,
        text(),
        "model folder, GGUF file or Hugging Face hub id",
        group="up",
        default_text="the bundled demo model",
    )
    smoke_test: bool = flag(False, switch(), "stream one completion to stdout when the server is ready")


class Pair:
    """A frontend and its engine.

    Args:
        config: the frontend's; its engine address is replaced.
        engine_command: program and the user's flags.
        folder: folder of the unix socket.
    """

    def __init__(self, config: FrontendConfig, engine_command: Sequence[str], folder: Path) -> None:
        socket = folder / "engine.sock"
        self._config = dataclasses.replace(config, engine=(f"unix:{socket}",))
        self._folder = folder
        self._socket = socket
        self._app = FrontendApp(self._config, warm_up=True) if config.workers == 1 else Supervisor(self._config)
        self._engine_command = [
            *engine_command,
            *("--log-level", config.log_level, "--log-format", config.log_format),
            *("--log-stats-interval", f"{config.log_stats_interval_s:g}"),
            *("--step-timeout", f"{config.step_timeout_s:g}"),
            *("--shutdown-timeout", str(config.shutdown_timeout_s)),
            *("--uds", str(socket), "--exit-on-stdin-close"),
        ]

    async def run(self, *, with_smoke_test: bool) -> int:
        """Serves until a signal or until the engine cannot run at all.

        Raises:
            ConfigError: the port cannot be had.
            WorkerFailed: a worker cannot run.
        """
        engine = EngineProcess(self._engine_command, engine_socket=self._socket)
        signals = self._signals(engine)
        signals.watch()
        grace_s = self._config.shutdown_timeout_s
        try:
            await self._app.start()
            if isinstance(self._app, FrontendApp):
                collect_when_idle(self._app.calls)
            supervision = asyncio.create_task(engine.run())
            announcement = asyncio.create_task(self._announce(with_smoke_test))
            signalled = asyncio.create_task(signals.stop.wait())
            await asyncio.wait({supervision, signalled}, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            announcement.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await announcement
            if supervision.done():  # its error is on stderr
                return supervision.result()
            num_drained = await self._app.drain(grace_s)
        finally:
            try:
                await self._app.stop()
            finally:
                await engine.stop(grace_s)
        await supervision
        announce(f"drained {num_drained}", self._config.log_format)
        return 0

    def _signals(self, engine: EngineProcess) -> StopSignals:
        """Returns the signal handlers; a second signal ends all processes at once."""
        app = self._app

        def clean_up() -> None:
            engine.kill()
            if isinstance(app, Supervisor):
                app.kill()
            shutil.rmtree(self._folder, ignore_errors=True)

        if isinstance(app, Supervisor):  # only the workers know the number of requests
            return StopSignals(clean_up=clean_up)
        calls = app.calls
        return StopSignals(count_open=lambda: calls.num_active, clean_up=clean_up)

    async def _announce(self, with_smoke_test: bool) -> None:
        """Announces that the pair serves, and runs the smoke test. The engine reports its own progress."""
        await self._app.wait_serving(None)
        logging.getLogger(_LINK_LOGGER).setLevel(logging.NOTSET)
        target = _target(self._config.host, self._app.port)
        if self._app.http_port is not None:
            http_target = _target(self._config.http_host or self._config.host, self._app.http_port)
            scheme = "http" if self._config.tls_cert is None else "https"
            announce(f"OpenAI's API on {scheme}://{http_target}/v1", self._config.log_format)
        announce(f"serving on {target}", self._config.log_format)
        if with_smoke_test:
            try:
                keys = load_keys(self._config.api_key, self._config.api_key_file)
                await run_smoke_test(target, keys[0].text if keys else None)
            except GenerationError as error:
                print(f"chairlift up: smoke test failed: {error_line(error, target)}", file=sys.stderr, flush=True)
            except OSError:  # the reader (`| head`) has gone, or the disk is full
                discard_stdout()
            announce("\nServing; Ctrl-C drains and stops.", TEXT)


def _parser() -> FlagParser:
    parser = FlagParser(
        "chairlift up",
        returns_unknown=True,
        description="Runs an engine and a frontend together, restarts the engine if it dies, and stops both on Ctrl-C "
        "or SIGTERM. Each flag is also the environment variable in brackets; the command line overrides it.",
        epilog="All other flags (--max-num-seqs, --max-model-len, ...) are passed to the engine: see "
        "chairlift-engine --help.",
    )
    add_flags(parser, _UpConfig)
    unused = ("engine", "engine_tls_ca", "engine_tls_client_cert", "engine_tls_client_key", "nice")
    add_flags(parser, FrontendConfig, hidden=unused)
    return parser


@contextlib.contextmanager
def _socket_folder() -> Iterator[Path]:
    """Creates a folder that only this user can enter, and removes it at the end."""
    root = tempfile.gettempdir()
    if len(root) + len("/chairlift-up-xxxxxxxx/engine.sock") > _MAX_SOCKET_PATH:
        root = "/tmp"
    folder = PrivateFolder("up-", root)
    try:
        yield folder.path
    finally:
        folder.remove()


def _target(host: str, port: int) -> str:
    """Returns the server's address for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
