"""Runs long work on the event loop in time slices, so that other tasks run in between.

A thread would not help: parsers hold the GIL for a whole call, and Python code in a thread takes the GIL from the event
loop at every system call. Work is a generator that yields where it may be interrupted.
"""

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

SLICE_S = 0.001
"""Duration of one slice. Work must yield several times as often."""

_IDS_AT_ONCE = 1 << 14

T = TypeVar("T")
Sliced = Generator[None, None, T]

_lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def pieces(token_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields token ids in pieces that are each copied or checked in less than a slice."""
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        yield token_ids[start : start + _IDS_AT_ONCE]


async def in_slices(work: Sliced[T]) -> T:
    """Runs the work and returns its result.

    Work that fits one slice finishes at once. Longer work continues one slice per iteration of the event loop, shared
    by all such work, so that many large requests delay the loop no longer than one does.
    """
    done, result = _slice(work)
    if done:
        return result  # type: ignore[return-value]
    lane = _lanes.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    try:
        async with lane:
            while True:
                await asyncio.sleep(0)
                done, result = _slice(work)
                if done:
                    return result  # type: ignore[return-value]
    finally:
        work.close()


def at_once(work: Sliced[T]) -> T:
    """Runs small work without interruption and returns its result."""
    results: list[T] = []

    def whole() -> Sliced[None]:
        results.append((yield from work))

    for _ in whole():
        pass
    return results[0]


def _slice(work: Sliced[T]) -> tuple[bool, T | None]:
    end_s = time.perf_counter() + SLICE_S
    try:
        while True:
            next(work)
            if time.perf_counter() >= end_s:
                return False, None
    except StopIteration as stop:
        return True, stop.value
