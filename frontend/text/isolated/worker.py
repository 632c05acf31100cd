"""Main loop of an isolated process: length-prefixed JSON frames on stdin and stdout.

    -> {"limits": {...}, settings of the kind of job}         <- {}
    -> a job                                                  <- its answer, repeatedly

Either answer may be {"error": ...}. A job that takes too long ends the process by a timer's signal. One that takes too
much memory ends it with `OUT_OF_MEMORY_STATUS`, or crashes it. The process exits when its stdin ends.
"""

import json
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
OUT_OF_MEMORY_STATUS = 97

Frame = dict[str, Any]
Handler = Callable[[Frame], Frame]
"""Returns the answer to a job."""


class Clock(StrEnum):
    """Clock of a job's time limit."""

    WALL = "wall"
    CPU = "cpu"  # independent of the machine's load


_TIMERS = {Clock.WALL: signal.ITIMER_REAL, Clock.CPU: signal.ITIMER_PROF}
TIMER_SIGNALS = (signal.SIGALRM, signal.SIGPROF)


class CannotStart(Exception):  # noqa: N818
    """The first frame is invalid; the message says why."""


def serve(start: Callable[[Frame], Handler], *, niceness: int = 0) -> None:
    """Answers jobs until stdin ends.

    Args:
        start: makes the handler from the first frame; raises CannotStart.
        niceness: increment of the nice value.
    """
    os.nice(niceness)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frames, answers = sys.stdin.buffer, sys.stdout.buffer
    hello = _read(frames)
    if hello is None:
        return
    limits = hello["limits"]
    timer = _TIMERS[Clock(limits["clock"])]
    start_timeout_s = limits["start_timeout_s"]
    if start_timeout_s is not None:
        _limit_memory(limits["memory_bytes"])
    try:
        with _limited(timer, start_timeout_s or 0):
            handle = start(hello)
    except CannotStart as error:
        _write(answers, {"error": str(error)})
        return
    _write(answers, {})
    if start_timeout_s is None:
        _limit_memory(limits["memory_bytes"])
    while (job := _read(frames)) is not None:
        with _limited(timer, limits["timeout_s"]):
            answer = handle(job)
        _write(answers, answer)


@contextmanager
def _limited(timer: int, timeout_s: float) -> Iterator[None]:
    signal.setitimer(timer, timeout_s)
    try:
        yield
    except MemoryError:
        sys.exit(OUT_OF_MEMORY_STATUS)
    finally:
        signal.setitimer(timer, 0)


def _limit_memory(num_bytes: int) -> None:
    """Limits the memory allocated from now on, where the system supports it."""
    status = Path("/proc/self/status")
    used = re.search(r"^VmSize:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if used is not None:
        limit = int(used[1]) * 1024 + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(frames: BinaryIO) -> Frame | None:
    head = frames.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    frame: Frame = json.loads(frames.read(length))
    return frame


def _write(answers: BinaryIO, answer: Frame) -> None:
    data = encode(answer)
    answers.write(LENGTH.pack(len(data)) + data)
    answers.flush()


def encode(frame: Frame) -> bytes:
    """Returns a frame's JSON. Lone surrogates pass through, because JSON can escape them."""
    return json.dumps(frame, ensure_ascii=False).encode(errors="surrogatepass")
