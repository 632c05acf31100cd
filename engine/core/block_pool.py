"""The blocks of the KV cache: reference counts, prefix hashes and the order of reuse.

A block is in exactly one of four states:

- owned: at least one block table holds it, as many as its reference count;
- deferred: no table holds it, but a step in flight may still read or write it;
- cached: idle, with the content of a full block that later requests may hit; evicted least recently used first;
- free: idle without usable content.

Hashes are opaque bytes here; the pool knows neither tokens nor requests.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import cast

from engine.core.request import BlockId
from engine.errors import IntegrityError


class BlockPool:
    """Allocates and frees blocks, and finds full blocks by hash.

    Freeing is deferred by step: a block freed while steps are in flight becomes reusable when the last step that began
    before the free has ended. Steps end in the order in which they began.

    Invariants: owned + cached + free + deferred == num_blocks; reference counts >= 0; a hash names one block and a
    block has at most one hash; a block without owners that is not deferred is idle exactly once.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes], None] | None = None) -> None:
        """Creates the pool.

        Args:
            num_blocks: all of them, free.
            on_evict: called with the hash of each block that a lookup no longer finds.
        """
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, BlockId] = {}
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self._fences = [0] * num_blocks  # the step whose end releases the block, 0 if it is not deferred
        self._deferred: deque[tuple[int, BlockId]] = deque()  # (fence, block), stale where the block's fence differs
        self._left_in_use = [0] * num_blocks  # the last step that may use the block for an owner that has freed it
        self._num_deferred = 0
        self._last_begun_step = 0
        self._last_ended_step = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Idle blocks that a prefix lookup may hit."""
        return len(self._cached)

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that become free when the steps in flight have ended."""
        return self._num_deferred

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether blocks freed now would be deferred."""
        return self._last_begun_step > self._last_ended_step

    def begin_step(self, step: int) -> None:
        """Notes that a step has begun: from now on it may read and write all owned blocks."""
        assert step > self._last_begun_step, f"step {step} began after step {self._last_begun_step}"
        self._last_begun_step = step

    def end_step(self, step: int) -> None:
        """Notes that a step and all earlier ones have ended; releases the blocks deferred to it."""
        assert self._last_ended_step < step <= self._last_begun_step, f"step {step} ended, but is not in flight"
        self._last_ended_step = step
        while self._deferred and self._deferred[0][0] <= step:
            fence, block_id = self._deferred.popleft()
            if self._fences[block_id] == fence:
                self._fences[block_id] = 0
                self._num_deferred -= 1
                if self._hashes[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Allocates blocks with one owner each and undefined content: free ones first, then the least recently used.

        Returns: the blocks; None, without a change, if fewer than `num_blocks` are available.
        """
        free, ref_counts = self._free, self._ref_counts
        if num_blocks > len(free) + len(self._cached):
            return None
        block_ids = []
        for _ in range(num_blocks):
            if free:
                block_id = free.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget_hash(block_id)
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def lookup(self, block_hash: bytes) -> BlockId | None:
        """Returns the block with this hash, or None; takes no reference."""
        return self._block_by_hash.get(block_hash)

    def is_idle(self, block_id: BlockId) -> bool:
        """Whether the block is free or cached, so that acquiring it leaves one block less to allocate."""
        return self._ref_counts[block_id] == 0 and not self._fences[block_id]

    def acquire(self, block_id: BlockId) -> None:
        """Adds an owner to a block found by `lookup`."""
        if self._ref_counts[block_id] == 0:
            if self._fences[block_id]:
                self._fences[block_id] = 0
                self._num_deferred -= 1
            else:
                del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def publish(self, block_id: BlockId, block_hash: bytes) -> bool:
        """Adds an owned, full and completely computed block to the hash table; of equal blocks the first one stays.

        Returns: whether the hash is new.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is published without an owner"
        if block_hash in self._block_by_hash or self._hashes[block_id] is not None:
            return False
        self._block_by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def free(self, block_ids: Sequence[BlockId], *, is_in_use: bool = True) -> None:
        """Drops one owner of each block of a table, given from the head of the sequence to its tail.

        The tail becomes reusable first, since a cached prefix is usable only while its head is cached.

        Args:
            block_ids: the blocks.
            is_in_use: whether steps in flight may still read or write them for this owner.
        """
        step = self._last_begun_step if self.has_steps_in_flight else 0
        ref_counts, hashes = self._ref_counts, self._hashes
        for block_id in reversed(block_ids):
            ref_counts[block_id] -= 1
            fence = step if is_in_use or self._left_in_use[block_id] > self._last_ended_step else 0
            if ref_counts[block_id] > 0:
                self._left_in_use[block_id] = max(self._left_in_use[block_id], fence)
            elif fence:
                self._fences[block_id] = fence
                self._deferred.append((fence, block_id))
                self._num_deferred += 1
            elif hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def check_integrity(self, owners: Iterable[Sequence[BlockId]]) -> None:
        """Checks that reference counts, hashes, lists and fences agree.

        Args:
            owners: every block table in use.
        Raises: IntegrityError: an inconsistency, with the block and the numbers.
        """
        # Uses set operations: this runs in live traffic, over every block.
        counts = Counter(chain.from_iterable(owners))
        blocks = cast("Sequence[BlockId]", range(self.num_blocks))
        owned, fenced = set(compress(blocks, self._ref_counts)), set(compress(blocks, self._fences))
        free, cached = set(self._free), set(self._cached)
        hashed = set(compress(blocks, self._hashes))
        parts = (len(owned), len(self._cached), len(self._free), self._num_deferred)
        if sum(parts) != self.num_blocks:
            raise IntegrityError("owned {} + cached {} + free {} + deferred {} != {}".format(*parts, self.num_blocks))
        if len(fenced) != self._num_deferred or len(free) != len(self._free):
            raise IntegrityError(f"{len(fenced)} fences for {self._num_deferred} deferred; {len(free)} distinct free")
        for block_id in owned | counts.keys():
            if self._ref_counts[block_id] != counts[block_id]:
                raise IntegrityError(
                    f"block {block_id}: reference count {self._ref_counts[block_id]}, in {counts[block_id]} tables"
                )
        if len(owned | cached | free | fenced) != self.num_blocks:
            states = Counter(chain(owned, cached, free, fenced))
            block_id = next(block_id for block_id in blocks if states[block_id] != 1)
            raise IntegrityError(f"block {block_id} is in {states[block_id]} states at once")
        waiting_for = {(fence, block_id) for fence, block_id in self._deferred}
        for block_id in fenced:
            if (self._fences[block_id], block_id) not in waiting_for:
                raise IntegrityError(f"block {block_id} waits for step {self._fences[block_id]} in no queue")
            if self._fences[block_id] <= self._last_ended_step:
                raise IntegrityError(f"block {block_id} waits for step {self._fences[block_id]}, which has ended")
        for block_id, block_hash in zip(blocks, self._hashes, strict=True):
            if block_hash is not None and self._block_by_hash.get(block_hash) != block_id:
                raise IntegrityError(f"block {block_id} has a hash that names another block")
        for block_id in (cached - hashed) | (free & hashed):
            raise IntegrityError(f"block {block_id} is idle in the wrong list")
        for block_id in owned - hashed:
            if self._ref_counts[block_id] > 1:
                raise IntegrityError(
                    f"block {block_id} has {self._ref_counts[block_id]} owners but was never published"
                )
        if len(self._block_by_hash) != len(hashed):
            raise IntegrityError(f"{len(self._block_by_hash)} hashes name fewer blocks")

    def _forget_hash(self, block_id: BlockId) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None, f"block {block_id} is cached without a hash"
        del self._block_by_hash[block_hash]
        self._hashes[block_id] = None
        if self._on_evict is not None:
            self._on_evict(block_hash)
