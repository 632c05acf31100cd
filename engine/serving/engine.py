"""Connects the two threads of an engine: the event loop that serves gRPC and the step loop that computes."""

import contextlib
import logging
from collections.abc import Callable
from typing import ParamSpec, Protocol

from engine.errors import DeviceError, IntegrityError, StepError
from engine.interfaces import Inbox
from engine.serving.coalescing import CoalescePolicy, ReportOutbox
from engine.serving.parts import EngineParts
from engine.serving.server import EngineService
from engine.serving.step_log import StepLog
from engine.step_loop import StepLoop

STOP_GRACE_S = 1.0
"""Time for streams to send their last messages when the engine stops."""

_P = ParamSpec("_P")
_log = logging.getLogger(__name__)


class Io(Protocol):
    """The event loop as seen from the step loop's thread: `IoThread`, or a stand-in in tests."""

    has_failed: bool

    def call(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Schedules a function on the event loop."""

    def stop(self, grace_s: float) -> None:
        """Lets streams send their messages for at most `grace_s`, then stops the server."""


class Engine:
    """One engine behind a service that is already listening.

    `drain` and `stop` may be called from any thread and from signal handlers.
    """

    def __init__(
        self,
        service: EngineService,
        io: Io,
        parts: EngineParts,
        step_log: StepLog | None = None,
        *,
        coalescing: CoalescePolicy | None = None,
        integrity_check_interval_s: float = 0.0,
    ) -> None:
        """Opens the service for frontends; `run` starts the step loop.

        Args:
            service: opened once `run` can be called.
            io: runs the service.
            parts: loaded.
            step_log: gets every step.
            coalescing: when the reports of several steps are delivered together; None: never.
            integrity_check_interval_s: see `StepLoop`.
        """
        self._service = service
        self._io = io
        self._outbox = ReportOutbox(io.call, service.deliver, coalescing or CoalescePolicy())
        inbox = Inbox()
        self._loop = StepLoop(
            parts.scheduler,
            parts.runner,
            inbox,
            self._outbox.put,
            on_step=step_log.write if step_log is not None else None,
            num_late_compiles=parts.num_late_compiles,
            integrity_check_interval_s=integrity_check_interval_s,
        )
        self._grammars = parts.grammars
        self._progress = parts.progress
        io.call(service.set_serving, parts, inbox, lambda: self._loop.snapshot)  # the loop replaces it every turn

    def run(self) -> None:
        """Serves until drained or stopped; the calling thread becomes the step loop.

        Raises:
            DeviceError: the device failed.
            IntegrityError: the KV cache accounting is inconsistent.
            StepError: a step failed otherwise, which has been logged, or the event loop failed.

        The open requests have then been ended with an error, if the event loop still runs.
        """
        loop = self._loop
        try:
            self._run_loop()
        except Exception as error:
            is_reported = isinstance(error, DeviceError | IntegrityError)  # main logs these in one line
            if not is_reported:
                _log.exception("step %d failed", loop.snapshot.engine_step + 1)
            with contextlib.suppress(RuntimeError):  # the event loop may have ended
                detail = str(error) if isinstance(error, IntegrityError) else f"step failed: {error}"
                self._io.call(self._service.fail, detail)
            if is_reported:
                raise
            raise StepError(str(error)) from error
        finally:
            self._io.stop(STOP_GRACE_S)
            self._grammars.close()
        if self._io.has_failed:
            raise StepError("the IO thread failed")
        if loop.num_drained or loop.num_cut:
            _log.info("drained: %d requests finished, %d cancelled", loop.num_drained, loop.num_cut)
        else:  # a frontend that stops too has waited for its calls before
            _log.info("drained: no requests were open")

    def _run_loop(self) -> None:
        """Runs the step loop; what waits then goes before the news of its end."""
        try:
            self._loop.run()
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop may have ended
                self._outbox.flush()

    @property
    def num_turns(self) -> int:
        """Iterations of the step loop so far, including idle ones; constant only if the loop hangs."""
        return self._loop.snapshot.loop_turns

    @property
    def shows_progress(self) -> bool:
        """Whether `mark` also changes during a step."""
        return self._progress is not None

    def mark(self) -> object:
        """Returns a value that changes with every iteration of the step loop, and during a step if `shows_progress`."""
        return self.num_turns, self._progress() if self._progress is not None else None

    def drain(self, grace_s: float) -> None:
        """Rejects new requests and finishes open ones within `grace_s`; then `run` returns."""
        self._loop.drain(grace_s)

    def stop(self) -> None:
        """Makes `run` return after the steps in flight."""
        self._loop.stop()
