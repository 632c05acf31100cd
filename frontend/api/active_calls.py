"""Counts active calls of all APIs, and refuses new ones once the server stops."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from frontend.errors import ServerDraining


class ActiveCalls:
    """Counts calls until they end, and gRPC answers until they have been sent."""

    def __init__(self) -> None:
        self._draining = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._unsent: set[object] = set()
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    @property
    def num_active(self) -> int:
        """Calls being served."""
        return self._num_active

    @property
    def num_unsent(self) -> int:
        """GRPC calls whose answer has not been sent completely."""
        return len(self._unsent)

    def refuse_new(self) -> None:
        """Refuses new calls; active ones continue."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Waits until no call is being served."""
        await self._idle.wait()

    async def wait_sent(self) -> None:
        """Waits until gRPC has sent everything."""
        await self._all_sent.wait()

    def add_unsent(self) -> Callable[[object], None]:
        """Counts one more gRPC call as unsent.

        Returns: a function to call when everything has been sent, or never will be; it may be called again.
        """
        call = object()
        self._unsent.add(call)
        self._all_sent.clear()

        def note_sent(_: object) -> None:
            self._unsent.discard(call)
            if not self._unsent:
                self._all_sent.set()

        return note_sent

    def check_open(self) -> None:
        """Checks that new calls are accepted.

        Raises:
            ServerDraining: the server stops.
        """
        if self._draining:
            raise ServerDraining("this server is stopping", retry_after_s=1.0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts one call.

        Raises:
            ServerDraining: the server stops.
        """
        self.check_open()
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()
