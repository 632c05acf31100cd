"""Which event loop a process runs on."""

import asyncio
from collections.abc import Callable


def loop_factory(*, use_uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What `asyncio.Runner` takes; None is asyncio's own loop."""
    if not use_uvloop:
        return None
    import uvloop  # not on every platform

    return uvloop.new_event_loop
