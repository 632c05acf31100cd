"""Block tables: which blocks hold the KV of which request, with automatic prefix caching.

The hash of a full block is SHA-256 over the hash of the previous block and the block's token ids; the chain starts with
the hash of the request's cache salt and adapter. Equal hashes therefore mean equal tokens from position 0 under an
equal salt and adapter, and no choice of tokens forges a collision. Hashing costs about 1 us per block of 16 tokens
(CPython 3.11, one core of a 2-vCPU cloud machine), once per block.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

from engine.core.block_pool import BlockPool
from engine.core.cache_events import CacheEvent, CacheEventRecorder
from engine.core.request import BlockId, Request, RequestId
from engine.errors import IntegrityError


class _BlockTable:
    """The blocks of one request, in order of position."""

    __slots__ = ("block_ids", "num_published")

    def __init__(self) -> None:
        self.block_ids: list[BlockId] = []
        self.num_published = 0  # leading blocks in the hash table, or equal to one there


class KVCacheManager:
    """Block tables of all running requests on top of one `BlockPool`.

    Invariants: a table covers the first `Request.num_slots` positions of its request without a gap; only full, computed
    blocks are published; only published blocks are shared.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, records_events: bool = False
    ) -> None:
        self.block_size = block_size
        self._events = CacheEventRecorder() if records_events else None
        self.pool = BlockPool(num_blocks, self._events.remove if self._events is not None else None)
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[RequestId, _BlockTable] = {}
        self._hashes: dict[RequestId, list[bytes]] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> tuple[BlockId, ...]:
        """Returns the block table of a running request."""
        return tuple(self._tables[request.request_id].block_ids)

    def num_published_tokens(self, request: Request) -> int:
        """Returns the leading tokens of a running request that are in the prefix cache."""
        return self._tables[request.request_id].num_published * self.block_size

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Returns how many blocks must be freed until a running request can hold `num_tokens` tokens; <= 0: none."""
        num_held = len(self._tables[request.request_id].block_ids)
        return self.num_blocks_for(num_tokens) - num_held - self.pool.num_free_blocks

    def leaves_free(self, request: Request, num_blocks: float) -> bool:
        """Returns whether at least so many blocks stay free if a waiting request is admitted with its known tokens.

        Cached blocks count as free until a request takes them. Those of its prefix that others hold are shared.
        """
        num_left = self.pool.num_free_blocks - self.num_blocks_for(request.num_tokens)
        if num_left < num_blocks:  # otherwise no lookup is needed
            num_left += sum(not self.pool.is_idle(block_id) for block_id in self.get_computed_blocks(request))
        return num_left >= num_blocks

    def get_computed_blocks(self, request: Request) -> list[BlockId]:
        """Returns the blocks of the longest cached prefix of a request.

        At least one token stays to be computed, and every prompt position whose logits are still needed. Takes no
        references: the result is valid until the pool changes.
        """
        if not self._enable_prefix_caching:
            return []
        block_ids = []
        num_known = request.num_prompt_logits if request.num_owed_logits > 0 else request.num_tokens - 1
        max_hits = num_known // self.block_size
        hashes = self._hashes.setdefault(request.request_id, [])
        for index in range(max_hits):
            if index == len(hashes):
                hashes.append(self._block_hash(request, index, hashes))
            block_id = self.pool.lookup(hashes[index])
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[BlockId] = ()
    ) -> Sequence[BlockId] | None:
        """Extends a request's table until it holds the first `num_tokens` tokens.

        Args:
            request: a running request, or one that is being admitted.
            num_tokens: tokens from position 0 that need a slot.
            computed_blocks: on admission, the result of `get_computed_blocks`: shared instead of allocated.
        Returns: the blocks appended to the table, without `computed_blocks`; None, without a change, if the pool has
        too few.
        """
        if num_tokens <= request.num_slots:
            return ()
        table = self._tables.get(request.request_id) or _BlockTable()
        pool, block_ids = self.pool, table.block_ids
        num_new_blocks = -(-num_tokens // self.block_size) - len(block_ids) - len(computed_blocks)
        if computed_blocks:
            num_hits_taken = sum(1 for block_id in computed_blocks if pool.is_idle(block_id))
            if num_new_blocks > pool.num_free_blocks - num_hits_taken:
                return None
            for block_id in computed_blocks:
                pool.acquire(block_id)
            block_ids += computed_blocks
            table.num_published += len(computed_blocks)
        new_block_ids = pool.allocate(num_new_blocks)
        if new_block_ids is None:
            assert not computed_blocks, f"{num_new_blocks} blocks needed, {pool.num_free_blocks} free"
            return None
        block_ids += new_block_ids
        request.num_slots = len(block_ids) * self.block_size
        self._tables[request.request_id] = table
        return new_block_ids

    def publish(self, request: Request, num_completed_tokens: int) -> None:
        """Adds the full blocks among the first `num_completed_tokens` tokens to the prefix cache.

        Called once the step that computed them has ended.
        """
        table = self._tables[request.request_id]
        num_full = num_completed_tokens // self.block_size
        if num_full <= table.num_published or not self._enable_prefix_caching:
            return
        hashes = self._hashes.setdefault(request.request_id, [])
        for index in range(table.num_published, num_full):
            if index == len(hashes):
                hashes.append(self._block_hash(request, index, hashes))
            is_new = self.pool.publish(table.block_ids[index], hashes[index])
            if is_new and self._events is not None and not request.cache_salt and request.adapter is None:
                token_ids = request.token_ids(index * self.block_size, (index + 1) * self.block_size)
                self._events.store(hashes[index - 1] if index else None, hashes[index], token_ids)
        table.num_published = num_full

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Returns what entered and left the prefix cache since the last call; nothing if it is not recorded."""
        return self._events.take() if self._events is not None else ()

    def free(self, request: Request) -> None:
        """Frees all blocks of a request, if it has any, and removes it."""
        self._hashes.pop(request.request_id, None)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            request.num_slots = 0
            self.pool.free(table.block_ids)

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Checks the pool and the block tables against the requests.

        Raises: IntegrityError: an inconsistency, with the request and the numbers.
        """
        self.pool.check_integrity(table.block_ids for table in self._tables.values())
        if self._tables.keys() != {request.request_id for request in running}:
            raise IntegrityError(f"{len(self._tables)} block tables for {len(running)} running requests")
        unknown = self._hashes.keys() - {request.request_id for request in (*running, *waiting)}
        if unknown:
            raise IntegrityError(f"hashes of finished requests {sorted(unknown)}")
        for request in running:
            table = self._tables[request.request_id]
            if len(set(table.block_ids)) != len(table.block_ids):
                raise IntegrityError(f"request {request.request_id} holds a block twice: {table.block_ids}")
            if request.num_slots != len(table.block_ids) * self.block_size:
                raise IntegrityError(
                    f"request {request.request_id}: {request.num_slots} slots in {len(table.block_ids)} blocks"
                )
            if request.num_computed_tokens > request.num_slots:
                raise IntegrityError(
                    f"request {request.request_id}: {request.num_computed_tokens} tokens in {request.num_slots} slots"
                )
            if table.num_published * self.block_size > request.num_computed_tokens:
                raise IntegrityError(
                    f"request {request.request_id}: {table.num_published} blocks published, "
                    f"{request.num_computed_tokens} tokens computed"
                )

    def _block_hash(self, request: Request, index: int, hashes: Sequence[bytes]) -> bytes:
        adapter = request.adapter
        previous = hashes[index - 1] if index else _root_hash(request.cache_salt, adapter and adapter.digest)
        tokens = request.token_ids(index * self.block_size, (index + 1) * self.block_size)
        return hashlib.sha256(previous + array("I", tokens).tobytes()).digest()


@lru_cache(maxsize=1024)
def _root_hash(cache_salt: bytes, adapter_digest: bytes | None) -> bytes:
    """Returns what the chain starts with; no salt of the base model gives that of an adapter."""
    root = hashlib.sha256(b"chairlift kv" + cache_salt).digest()
    if adapter_digest is None:
        return root
    return hashlib.sha256(b"chairlift lora" + adapter_digest + root).digest()
