"""Tasks of the frontend that outlive it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TURNS = 5  # of the event loop, for tasks that are ending


@asynccontextmanager
async def no_tasks_left() -> AsyncIterator[None]:
    """Asserts that every task of the frontend that begins in the body has ended with it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if "frontend" in repr(task.get_coro())]
    assert not left, "tasks still run"
