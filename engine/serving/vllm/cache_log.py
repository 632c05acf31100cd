"""The prefix cache as gateways see it: the blocks that it holds, and batches of events for those that follow it.

Blocks are named by the first 8 bytes of their hash, as signed integers. Sequence numbers start at the time of the start
in microseconds: a cursor of an earlier process is out of range instead of wrong.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import grpc
from smg_grpc_proto.generated import common_pb2

from engine.core.cache_events import BlocksRemoved, BlocksStored, CacheEvent
from engine.serving.client_errors import CallRefused

MAX_BATCHES = 1024
"""Batches that are kept for subscribers; who is further behind starts again."""
SNAPSHOT_BLOCKS = 1024
"""Blocks in one batch of a snapshot."""


class _LiveBlock(NamedTuple):
    parent: int | None
    token_ids: "array[int]"


class CacheLog:
    """Follows the prefix cache of one engine; lives on the event loop.

    Invariant: the last batch has the number `_sequence`; those before it are numbered without a gap.

    Args:
        first_sequence: number of the state before the first batch.
    """

    def __init__(self, first_sequence: int | None = None) -> None:
        self._sequence = time.time_ns() // 1000 if first_sequence is None else first_sequence
        self._event_id = 0
        self._live: dict[int, _LiveBlock] = {}
        self._batches: deque[Any] = deque(maxlen=MAX_BATCHES)
        self._changed = asyncio.Event()  # replaced at every change
        self._is_closed = False

    @property
    def num_blocks(self) -> int:
        """Blocks that the prefix cache holds."""
        return len(self._live)

    def add(self, events: Iterable[CacheEvent]) -> None:
        """Adds what entered and left the cache in a step, as one batch."""
        messages = [message for event in events if (message := self._message(event)) is not None]
        if messages:
            self._sequence += 1
            self._batches.append(_batch(self._sequence, messages))
            self._wake()

    def close(self) -> None:
        """Ends all subscriptions."""
        self._is_closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[Any]:
        """Yields batches until the log is closed.

        Args:
            start: number of the last batch that the subscriber has; 0: it has none and gets what the cache holds first.
        Raises: CallRefused: the batches after `start` are no longer, or not yet, there. The subscriber starts again.
        """
        if start == 0:
            for batch in self._snapshot():
                yield batch
                start = batch.sequence_number
        elif not self._oldest - 1 <= start <= self._sequence:
            raise CallRefused(
                grpc.StatusCode.OUT_OF_RANGE,
                f"start_sequence_number is {start}, this engine has {self._oldest - 1} to {self._sequence}: start at 0",
            )
        while not self._is_closed:
            changed = self._changed
            while start < self._sequence:
                if start < self._oldest - 1:
                    detail = f"the subscriber is at {start}, batches before {self._oldest} are gone: start at 0"
                    raise CallRefused(grpc.StatusCode.DATA_LOSS, detail)
                start += 1
                yield self._batches[start - self._oldest]
            await changed.wait()

    @property
    def _oldest(self) -> int:
        """Number of the oldest batch that is kept."""
        return self._sequence - len(self._batches) + 1

    def _message(self, event: CacheEvent) -> Any:
        self._event_id += 1
        match event:
            case BlocksStored():
                return self._stored(event)
            case BlocksRemoved():
                hashes = [name for block_hash in event.hashes if self._live.pop(name := _name(block_hash), None)]
                if not hashes:
                    return None
                removed = common_pb2.KvBlocksRemoved(block_hashes=hashes)
                return common_pb2.KvCacheEvent(event_id=self._event_id, removed=removed)

    def _stored(self, event: BlocksStored) -> Any:
        block_size = len(event.token_ids) // len(event.hashes)
        first_parent = parent = None if event.parent is None else _name(event.parent)
        blocks = []
        for index, block_hash in enumerate(event.hashes):
            name, token_ids = _name(block_hash), event.token_ids[index * block_size : (index + 1) * block_size]
            self._live[name] = _LiveBlock(parent, array("I", token_ids))
            blocks.append(_block(name, token_ids))
            parent = name
        stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=first_parent)
        return common_pb2.KvCacheEvent(event_id=self._event_id, stored=stored)

    def _snapshot(self) -> Iterable[Any]:
        """Returns what the cache holds now, in batches whose numbers end at the current one; parents come first."""
        live, sequence = dict(self._live), self._sequence
        count = max(1, -(-len(live) // SNAPSHOT_BLOCKS))
        ordered = _parents_first(live)
        for index in range(count):
            events = [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())] if index == 0 else []
            for name in ordered[index * SNAPSHOT_BLOCKS : (index + 1) * SNAPSHOT_BLOCKS]:
                block = live[name]
                blocks = [_block(name, block.token_ids)]
                stored = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=block.parent)
                events.append(common_pb2.KvCacheEvent(stored=stored))
            batch = _batch(sequence - count + 1 + index, events)
            batch.snapshot.CopyFrom(common_pb2.KvSnapshotChunk(index=index, count=count, blocks=len(live)))
            yield batch

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _parents_first(live: dict[int, _LiveBlock]) -> list[int]:
    """Orders blocks. A parent may be younger than its child: it was evicted and computed again meanwhile."""
    ordered: dict[int, None] = {}
    for last in live:
        chain = []
        name: int | None = last
        while name is not None and name in live and name not in ordered:
            chain.append(name)
            name = live[name].parent
        ordered.update(dict.fromkeys(reversed(chain)))
    return list(ordered)


def _batch(sequence: int, events: Sequence[Any]) -> Any:
    return common_pb2.KvEventBatch(sequence_number=sequence, timestamp=time.time(), events=events)


def _block(name: int, token_ids: Sequence[int]) -> Any:
    return common_pb2.KvBlock(block_hash=name, token_ids=token_ids, block_size=len(token_ids))


def _name(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big", signed=True)
