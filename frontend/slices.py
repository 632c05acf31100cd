"""Long work on the event loop, cut into slices: everybody else has a turn between two of them.

A thread would not do: parsers hold the GIL for as long as one call takes, and Python code in a thread takes the GIL
from the loop at every system call that the loop makes. Work is a generator, which yields where it may be interrupted.
"""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar
from weakref import WeakKeyDictionary

SLICE_S = 0.001
"""How long the work goes on before the others have their turn. It must yield several times as often."""

T = TypeVar("T")
Sliced = Generator[None, None, T]

_lanes: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def in_slices(work: Sliced[T]) -> T:
    """Does the work and returns its result.

    What one slice can finish is done at once. The rest of longer work waits for its turn: of all that goes on at once
    in an event loop one has a slice per turn, so that many large requests hold up the loop no longer than one does.
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
    """Does work that is known to be small, and returns its result."""
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
