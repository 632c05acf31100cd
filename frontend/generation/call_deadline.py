"""The time a call may take where the server sees to it: HTTP has no word for a deadline, and over gRPC a client may
name none.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from frontend.errors import DeadlineExceeded


class CallDeadline:
    """When a call's time is up.

    Args:
        at_s: time.monotonic(); None: never.
    """

    def __init__(self, at_s: float | None) -> None:
        self._at_s = at_s

    def remaining_s(self) -> float | None:
        """Until then; negative afterwards."""
        return None if self._at_s is None else self._at_s - time.monotonic()

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels what runs inside when the time is up.

        Raises:
            DeadlineExceeded: it was.
        """
        try:
            async with asyncio.timeout(self.remaining_s()) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the call's deadline passed before its answer was complete") from None
