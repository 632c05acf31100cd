"""The deadline of a call: how much time is left, and whether it has passed.

gRPC cancels a call whose client has set a deadline. The server cancels the others itself: HTTP has no deadlines, and a
gRPC client may have set none.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from frontend.errors import DeadlineExceeded

_ROUNDING = 0.01
_CLOCK_SLACK_S = 0.02


class Deadline:
    """The deadline of one call. Create it when the call arrives.

    Args:
        remaining_s: returns the seconds left, negative afterwards; None: there is no deadline.
        enforced: whether this server cancels the call; False: gRPC does.
    """

    def __init__(self, remaining_s: Callable[[], float | None], *, enforced: bool = False) -> None:
        self.remaining_s = remaining_s
        self._enforced = enforced
        # gRPC rounds a deadline to three digits on the wire: the server may see up to 1 % more time than the client.
        self._slack_s = _CLOCK_SLACK_S + _ROUNDING * (remaining_s() or 0.0)

    @classmethod
    def at(cls, at_s: float | None) -> Self:
        """Returns a deadline that this server enforces.

        Args:
            at_s: time.monotonic(); None: no deadline.
        """
        return cls(lambda: None if at_s is None else at_s - time.monotonic(), enforced=True)

    def passed(self) -> bool:
        """Whether a cancellation may be due to the deadline: gRPC does not tell it from a client that has left, and the
        client's clock may have run out first.
        """
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= self._slack_s

    @asynccontextmanager
    async def enforce(self) -> AsyncIterator[None]:
        """Cancels the body at the deadline, if this server enforces it.

        Raises:
            DeadlineExceeded: the deadline passed.
        """
        try:
            async with asyncio.timeout(self.remaining_s() if self._enforced else None) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise DeadlineExceeded("the call's deadline passed before its answer was complete") from None
