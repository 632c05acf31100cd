"""What enters and leaves the prefix cache, recorded for gateways that route by it.

Only blocks that any request without a salt and an adapter may hit are recorded as stored. Removals are recorded for all
blocks: a subscriber ignores the hashes that it does not know.
"""

from collections.abc import Sequence
from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Consecutive full blocks that entered the prefix cache.

    Attributes:
        parent: hash of the block before the first one; None: the first one starts a sequence.
        hashes: of the blocks, in order.
        token_ids: of all blocks, [len(hashes) * block_size].
    """

    parent: bytes | None
    hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]


class BlocksRemoved(NamedTuple):
    """Blocks that left the prefix cache, because they are used again."""

    hashes: tuple[bytes, ...]


CacheEvent = BlocksStored | BlocksRemoved


class CacheEventRecorder:
    """Collects events until they are taken; consecutive blocks share one."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []
        self._parent: bytes | None = None  # of the run of stored blocks below
        self._stored: list[bytes] = []
        self._token_ids: list[int] = []

    def store(self, parent: bytes | None, block_hash: bytes, token_ids: Sequence[int]) -> None:
        """Records a block that entered the cache."""
        self._end_removed()
        if not self._stored or self._stored[-1] != parent:
            self._end_stored()
            self._parent = parent
        self._stored.append(block_hash)
        self._token_ids.extend(token_ids)

    def remove(self, block_hash: bytes) -> None:
        """Records a block that left the cache."""
        self._end_stored()
        self._removed.append(block_hash)

    def take(self) -> tuple[CacheEvent, ...]:
        """Returns the events since the last call, in order."""
        self._end_stored()
        self._end_removed()
        events, self._events = self._events, []
        return tuple(events)

    def _end_stored(self) -> None:
        if self._stored:
            self._events.append(BlocksStored(self._parent, tuple(self._stored), tuple(self._token_ids)))
            self._stored, self._token_ids = [], []

    def _end_removed(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(tuple(self._removed)))
            self._removed = []
