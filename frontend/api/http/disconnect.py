"""Cancels a call when its client disconnects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGone(Exception):  # noqa: N818 - it is never reported
    """The client closed its connection before it had its answer."""


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body when the client closes its connection. The request's body must have been read.

    Raises:
        ClientGone: the client has disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # else the task is cancelled for another reason too
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
