"""When a frontend collects garbage: full collections wait until no call is open.

A full collection walks all objects that can be in cycles, and blocks the event loop meanwhile: for 30 to 70 ms while
2,048 answers are open. Python starts one whenever a quarter of them is new. A call leaves about forty objects in
cycles, most of which the collections of young objects find.
"""

import asyncio
import gc
from typing import Protocol

_INTERVAL_S = 5.0
_LONGEST_S = 60.0  # without a full collection while calls are always open
_NEVER = 2**31 - 1  # collections of younger objects before Python starts a full one


class _Calls(Protocol):
    @property
    def num_active(self) -> int: ...


def collect_when_idle(calls: _Calls) -> None:
    """Starts full collections from the running event loop, instead of Python; all objects that exist now stay.

    Call it once the frontend has started: its imports have made most objects. `calls` counts those that are open.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    loop = asyncio.get_running_loop()
    last_s = loop.time()

    def collect() -> None:
        nonlocal last_s
        if not calls.num_active or loop.time() - last_s >= _LONGEST_S:
            gc.collect()
            last_s = loop.time()
        loop.call_later(_INTERVAL_S, collect)

    loop.call_later(_INTERVAL_S, collect)
