"""How long an event loop is held: the CPU time of its longest turn, and of the longest call into C elsewhere.

CPU time, because a busy machine makes wall time say nothing of the code. A call into C that another thread makes holds
the GIL for its CPU time, and with it the loop, unless it is known to let it go.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_WITHOUT_GIL = frozenset({"encode_batch_fast", "decompress", "compress"})
"""Names of functions that do their work without the GIL."""


class LoopWatch:
    """What was longest since the last `take`. Watches the loop of the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._longest: tuple[float, str] = (0.0, "")

    def take(self) -> tuple[float, str]:
        """Seconds of CPU time of the longest hold, and what it was."""
        longest, self._longest = self._longest, (0.0, "")
        return longest

    def note(self, held_s: float, what: Callable[[], str]) -> None:
        """Takes one hold."""
        if held_s > self._longest[0]:
            self._longest = (held_s, what())


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    """Watches the running loop, and threads that begin meanwhile."""
    watch = LoopWatch()
    run, thread_id = asyncio.Handle._run, threading.get_ident()
    loop: Any = asyncio.get_running_loop()
    loop.set_task_factory(_python_task)
    turn, longest = loop._run_once, (0.0, "")

    def timed_run(handle: asyncio.Handle) -> None:
        nonlocal longest
        if threading.get_ident() != thread_id:
            run(handle)
            return
        start_s = time.thread_time()
        run(handle)
        held_s = time.thread_time() - start_s
        if held_s > longest[0]:
            longest = (held_s, _name(handle))

    def timed_turn() -> None:
        nonlocal longest
        longest, start_s = (0.0, ""), time.thread_time()
        turn()
        watch.note(time.thread_time() - start_s, lambda: f"{longest[0] * 1e3:.1f} ms: {longest[1]}")

    loop._run_once = timed_turn
    asyncio.Handle._run = timed_run  # type: ignore[assignment, method-assign]
    threading.setprofile(_CallTimes(watch).profile)
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        threading.setprofile(None)
        loop._run_once = turn
        loop.set_task_factory(None)


def _python_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    """A task that is not made in C, whose callbacks say whose they are."""
    return asyncio.tasks._PyTask(coroutine, loop=loop, **options)  # type: ignore[attr-defined]


def _name(handle: asyncio.Handle) -> str:
    """What a callback was: of a task where it waits now."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    if not isinstance(task, asyncio.Task | asyncio.tasks._PyTask):  # type: ignore[attr-defined]
        return repr(handle)[:200]
    names: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and isinstance(getattr(awaited, "__qualname__", None), str):
        names.append(awaited.__qualname__)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return " > ".join(names[-6:])


class _CallTimes(threading.local):
    """One thread's calls into C that go on."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch
        self._starts: list[float] = []

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """See sys.setprofile."""
        if event == "c_call":
            self._starts.append(time.thread_time())
        elif event in ("c_return", "c_exception") and self._starts:
            held_s = time.thread_time() - self._starts.pop()
            name = getattr(arg, "__qualname__", "")
            if name.rpartition(".")[2] not in _WITHOUT_GIL:
                thread = threading.current_thread().name
                code = frame.f_code
                self._watch.note(held_s, lambda: f"{name} in {thread}, called by {code.co_qualname}")
            if event == "c_return" and sys.getprofile() is None:
                self._starts.clear()


def slowness() -> float:
    """How much slower this machine runs Python and memory than the one that the limits were measured on; at least 1."""
    best_s = min(_yardstick_s() for _ in range(5))
    return max(1.0, best_s / 0.0125)


def _yardstick_s() -> float:
    start_s = time.thread_time()
    numbers = [str(number) for number in range(50_000)]
    joined = ",".join(numbers).encode()
    assert sum(map(len, joined.split(b","))) > 0
    return time.thread_time() - start_s
