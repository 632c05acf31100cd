"""Limits how long a stream waits for a client that reads nothing."""

import asyncio
from types import TracebackType

from frontend.errors import ClientStalled


class StallGuard:
    """A context manager around each write of one stream; `close` it when the stream has ended.

    All writes share one timer, which looks when the current one began. `asyncio.timeout` arms and cancels a timer per
    write, which takes a tenth of what a token costs the frontend.

    Invariant: one write at a time.

    Args:
        timeout_s: most seconds of one write.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None  # that writes
        self._num_cancels = 0  # of the task, before the write
        self._due_s = 0.0
        self._is_late = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert self._task is None, "one write at a time"
        self._task = task
        self._num_cancels = task.cancelling()
        self._due_s = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raises: ClientStalled: the write took too long."""
        task, self._task = self._task, None
        if not self._is_late:
            return
        self._is_late = False
        assert task is not None
        is_ours = task.uncancel() <= self._num_cancels  # else it is cancelled for another reason too
        if is_ours and kind is asyncio.CancelledError:
            raise ClientStalled(f"the client has read nothing for {self._timeout_s:g} s") from error

    def close(self) -> None:
        """Removes the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # the next write has a new timer
        if self._loop.time() < self._due_s:
            self._timer = self._loop.call_at(self._due_s, self._look)
            return
        self._is_late = True
        self._task.cancel()
