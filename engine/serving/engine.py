"""Puts the threads together: an event loop that serves gRPC, and a step loop that computes."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.scheduler import Scheduler
from engine.errors import DeviceError, IntegrityError, StepError
from engine.interfaces import Inbox, ModelRunner
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.grammar_compiler import GrammarCompiler
from engine.serving.server import EngineService, ServingParts
from engine.serving.step_log import StepLog
from engine.step_loop import StepLoop

# What streams get to send their last messages: a failure is reported at once or not at all.
FAREWELL_S = 1.0

_P = ParamSpec("_P")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model, ready to serve.

    Attributes:
        info: what frontends must know of it.
        max_open_requests: requests held for all frontends together.
        grammars: compiles those of requests.
        num_late_compiles: kernels compiled since the engine was ready, in this process.
        progress: returns something that changes while a step gets on; called by any thread, at any time. None: nothing
            does, as where a device computes.
    """

    scheduler: Scheduler
    runner: ModelRunner
    info: pb.EngineInfo
    tokenizer: TokenizerFiles
    max_open_requests: int
    grammars: GrammarCompiler
    num_late_compiles: Callable[[], int] = lambda: 0
    progress: Callable[[], object] | None = None


class Io(Protocol):
    """The event loop as the step loop's thread sees it: `IoThread`, or a test's own loop."""

    has_failed: bool

    def call(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Runs a function on the event loop, soon."""

    def stop(self, grace_s: float) -> None:
        """Lets streams send what they have for at most `grace_s`, then ends the server."""


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
        integrity_check_interval_s: float = 0.0,
    ) -> None:
        """Opens the service for frontends; the step loop waits for `run`."""
        self._service = service
        self._io = io
        inbox = Inbox()
        self._loop = StepLoop(
            parts.scheduler,
            parts.runner,
            inbox,
            lambda report: io.call(service.deliver, report),
            on_step=step_log.write if step_log is not None else None,
            num_late_compiles=parts.num_late_compiles,
            integrity_check_interval_s=integrity_check_interval_s,
        )
        io.call(service.set_tokenizer, parts.tokenizer)
        info = parts.info
        self._grammars = parts.grammars
        snapshot = lambda: self._loop.snapshot  # noqa: E731 - the loop replaces it every turn
        self._progress = parts.progress
        io.call(
            service.set_serving,
            ServingParts(info, inbox, parts.max_open_requests, snapshot, self._grammars, parts.progress),
        )

    def run(self) -> None:
        """Serves until drained or stopped; the calling thread becomes the step loop.

        Raises:
            DeviceError: the device failed.
            IntegrityError: the scheduler's books contradict each other.
            StepError: a step failed otherwise, which has been logged, or the event loop did.

        Every frontend has been told, as far as it could be.
        """
        loop = self._loop
        try:
            loop.run()
        except Exception as error:
            is_told = isinstance(error, DeviceError | IntegrityError)  # in one line, by whoever ends the process
            if not is_told:
                _log.exception("step %d failed", loop.snapshot.engine_step + 1)
            with contextlib.suppress(RuntimeError):  # the event loop is gone, perhaps that is what failed
                detail = str(error) if isinstance(error, IntegrityError) else f"step failed: {error}"
                self._io.call(self._service.fail, detail)
            if is_told:
                raise
            raise StepError(str(error)) from error
        finally:
            self._io.stop(FAREWELL_S)
            self._grammars.close()
        if self._io.has_failed:
            raise StepError("the IO thread failed")
        _log.info("drained %d requests, %d cut off", loop.num_drained, loop.num_cut)

    @property
    def num_turns(self) -> int:
        """Turns of the step loop so far, idle ones included: stands still only if the loop does."""
        return self._loop.snapshot.loop_turns

    @property
    def shows_progress(self) -> bool:
        """Whether `mark` changes within a step too."""
        return self._progress is not None

    def mark(self) -> object:
        """Changes with every turn of the step loop, and within a step where that can be seen."""
        return self.num_turns, self._progress() if self._progress is not None else None

    def drain(self, grace_s: float) -> None:
        """Takes nothing new, finishes what is there within `grace_s`, then `run` returns."""
        self._loop.drain(grace_s)

    def stop(self) -> None:
        """Lets `run` return after the steps in flight."""
        self._loop.stop()
