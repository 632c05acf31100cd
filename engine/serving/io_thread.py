"""The thread of the engine's event loop; grpc.aio allows one event loop per process."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import ParamSpec

from engine.errors import ConfigError
from engine.serving.listener import Listener

_P = ParamSpec("_P")
_log = logging.getLogger(__name__)


class IoThread:
    """Runs a `Listener` until `stop`.

    `start` returns once the address is bound, so that a port in use is reported before the weights are loaded.
    """

    def __init__(self, make_listener: Callable[[], Listener], on_failure: Callable[[], None]) -> None:
        """Creates the thread; `start` starts it.

        Args:
            make_listener: called on this thread, in its event loop.
            on_failure: called on this thread if it fails.
        """
        self._make_listener = make_listener
        self._on_failure = on_failure
        self._has_started = threading.Event()
        self._bind_error: ConfigError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[float] | None = None
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="grpc-io", daemon=True)
        self.address = ""  # until `start` has bound it
        self.has_failed = False

    def start(self) -> None:
        """Binds the address and starts to serve.

        Raises: ConfigError: the address cannot be bound.
        """
        self._thread.start()
        self._has_started.wait()
        if self._bind_error is not None:
            self._thread.join()
            raise self._bind_error

    def call(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Schedules a function on the event loop.

        If the function raises, the thread fails. An event loop would log the error and continue, and requests would
        lose output.
        """
        assert self._loop is not None, "call before start"
        self._loop.call_soon_threadsafe(lambda: self._run_call(lambda: function(*args, **kwargs)))

    def stop(self, grace_s: float) -> None:
        """Lets streams send their messages for at most `grace_s`, then stops the server and the thread.

        May be called twice, and after an interrupted `start`.
        """
        if self._thread.ident is None:
            return
        self._has_started.wait()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop never started, failed, or was stopped
                self.call(self._request_stop, grace_s)
        self._thread.join()

    def _run_call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            self._defect = error
            self._request_stop(0.0)

    def _request_stop(self, grace_s: float) -> None:
        assert self._stop is not None
        if not self._stop.done():
            self._stop.set_result(grace_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            _log.exception("The IO thread failed")
            self.has_failed = True
            self._on_failure()
        finally:
            self._has_started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = self._loop.create_future()
        listener = self._make_listener()
        try:
            await listener.start()
        except ConfigError as error:
            self._bind_error = error
            return
        self.address = listener.address
        self._has_started.set()
        failure = asyncio.create_task(listener.failure())
        failure.add_done_callback(lambda _: self._request_stop(0.0))
        grace_s = await self._stop
        if failure.done():
            await failure  # raises
        if self._defect is None:
            await listener.stop(grace_s)
        if self._defect is not None:
            raise self._defect
