"""The calls being served, through whatever door they came: counted, and refused once the server stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from frontend.errors import ServerDraining


class ActiveCalls:
    """Counts calls from their arrival to their end."""

    def __init__(self) -> None:
        self._draining = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Calls being served."""
        return self._num_active

    def refuse_new(self) -> None:
        """From now on takes nothing new; calls being served go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Waits until no call is being served."""
        await self._idle.wait()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts one call.

        Raises:
            ServerDraining: no more calls are taken.
        """
        if self._draining:
            raise ServerDraining("this server is stopping", retry_after_s=1.0)
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()
