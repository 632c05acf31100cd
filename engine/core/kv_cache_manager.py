"""Block tables: which blocks hold the KV of which request, with automatic prefix caching.

In a model with sliding windows (`cache_groups.py`) a request has several tables of equal length. Those with a window
lose their first blocks while it advances, and get their blocks step by step: on admission they are only promised to it.
"""

from collections.abc import Mapping, Sequence

from engine.core.block_hashes import HASH_BYTES, BlockHashes
from engine.core.block_pool import BlockPool
from engine.core.cache_events import CacheEvent, CacheEventRecorder
from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.config import SchedulerConfig
from engine.core.request import BlockId, Request, RequestId
from engine.core.state_snapshots import SavedState, StateSnapshots
from engine.errors import IntegrityError

_NO_BLOCK = BlockId(0)  # of a prefix, in front of the window: never read


class _BlockTable:
    """The blocks of one request.

    Attributes:
        block_ids: in order of position; those of a position in all groups follow each other.
        num_published: leading blocks of each group in the hash table, or equal to one there.
        first: of each group with a window, the blocks before this one are no longer held.
        borrowed: blocks with a window that other requests held when it took them; releasing them frees nothing.
        num_lost: its own blocks with a window that were not free once released, because others share them now.
        num_reserved: blocks of each group, held or promised.
        num_promised: blocks of the pool that no other request may take.
        is_private: whether its blocks with a window are never shared.
    """

    __slots__ = (
        "block_ids", "borrowed", "first", "is_private", "num_lost", "num_promised", "num_published", "num_reserved",
    )  # fmt: skip

    def __init__(self) -> None:
        self.block_ids: list[BlockId] = []
        self.num_published = 0
        self.first = 0
        self.borrowed: set[BlockId] = set()
        self.num_lost = 0
        self.num_reserved = 0
        self.num_promised = 0
        self.is_private = False


class KVCacheManager:
    """Block tables of all running requests on top of one `BlockPool`.

    Invariants: a table covers the first `Request.num_slots` positions of its request without a gap, except those in
    front of a window; only full, computed blocks are published; only published blocks are shared; the pool has as many
    free blocks as are promised.

    Attributes:
        states: copies of states, for a model that keeps some.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: CacheGroups = ONE_GROUP,
        step_tokens: int = 0,
        enable_prefix_caching: bool = True,
        records_events: bool = False,
        states: StateSnapshots | None = None,
    ) -> None:
        """Creates the pool.

        Args:
            num_blocks: of the pool.
            block_size: tokens per block.
            groups: the block tables of a request.
            step_tokens: most tokens of all steps in flight; needed with windows.
            enable_prefix_caching: whether full blocks of equal prefixes are shared.
            records_events: whether `take_events` returns some; they are those of the first group.
            states: copies of states, at which prefixes end; None: the model keeps none besides keys and values.
        """
        self.block_size = block_size
        self._groups = groups
        self._num_groups = groups.num_groups
        self._windowed = range(groups.num_full, groups.num_groups)
        self._step_tokens = step_tokens
        self._most_windowed = groups.most_windowed_blocks(step_tokens, block_size)
        self._events = CacheEventRecorder() if records_events else None
        self.pool = BlockPool(num_blocks, self._note_evicted if records_events else None)
        self._enable_prefix_caching = enable_prefix_caching
        self.states = states or StateSnapshots(0)
        self._keeps_state = enable_prefix_caching and states is not None
        self._tables: dict[RequestId, _BlockTable] = {}
        self._hashes = BlockHashes(block_size)
        self._num_promised = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated now and are promised to no request."""
        return self.pool.num_free_blocks - self._num_promised

    def block_ids(self, request: Request) -> tuple[BlockId, ...]:
        """Returns the block tables of a running request: for each position, one block per group.

        Entries in front of a window are stale: the request no longer owns these blocks.
        """
        return tuple(self._tables[request.request_id].block_ids)

    def num_published_tokens(self, request: Request) -> int:
        """Returns the leading tokens of a running request that are in the prefix cache."""
        return self._tables[request.request_id].num_published * self.block_size

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Returns how many blocks must be freed until a running request can hold `num_tokens` tokens; <= 0: none."""
        table = self._tables[request.request_id]
        num_blocks = self._num_blocks_for(num_tokens)
        num_needed = self._num_groups * num_blocks - len(table.block_ids)
        return num_needed - self.num_available_blocks - table.num_promised + self._num_outstanding(table, num_blocks)

    def leaves_free(self, request: Request, num_blocks: float) -> bool:
        """Returns whether `num_blocks` blocks stay free if a waiting request is admitted with its known tokens.

        Cached blocks count as free until a request takes them. Those of its prefix that others hold are shared.
        """
        num_most = self._groups.most_blocks(request.num_tokens, self._step_tokens, self.block_size)
        num_left = self.num_available_blocks - num_most
        if num_left < num_blocks:  # otherwise no lookup is needed
            prefix = self.get_computed_blocks(request)
            held = self._held(prefix, self._first_block(len(prefix) // self._num_groups))
            num_left += sum(not self.pool.is_idle(block_id) for block_id in held)
        return num_left >= num_blocks

    def get_computed_blocks(self, request: Request, *, is_private: bool = False) -> list[BlockId]:
        """Returns the blocks of the longest cached prefix of a request, as `block_ids` does.

        At least one token stays to be computed, and every prompt position whose logits are still needed. If the model
        keeps state, there is a copy of it. Takes no references: the result is valid until the pool changes.
        is_private as of `admit`.
        """
        if not self._enable_prefix_caching or (is_private and self._windowed):
            return []
        block_ids = self._cached_blocks(request)
        if not self._keeps_state:
            return block_ids
        return block_ids[: self.states.num_blocks(self._hashes.of(request, len(block_ids))[: len(block_ids)])]

    def _cached_blocks(self, request: Request) -> list[BlockId]:
        """Returns the blocks of the longest prefix whose keys and values are cached."""
        block_ids = []
        num_known = request.num_prompt_logits if request.num_owed_logits > 0 else request.num_tokens - 1
        num_hits = num_known // self.block_size
        if self._groups.num_full:
            for block_hash in self._hashes.walk(request, num_hits):
                block_id = self.pool.lookup(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
            num_hits = len(block_ids)
        if not self._windowed:
            return block_ids
        return self._with_windows(block_ids, self._hashes.of(request, num_hits)[:num_hits])

    def resume_state(self, request: Request, num_tokens: int) -> int | None:
        """Returns the slot of the state after an admitted request's cached prefix; None: it has no prefix, or no state.

        Also sets `state_points`: where steps of its prompt end so that the state there can be copied.
        """
        if not self._keeps_state:
            return None
        num_cached = len(self._cached_blocks(request)) * self.block_size
        request.state_points = self.states.points(request, num_tokens, num_cached, self.block_size)
        return self.states.use(self._hash_before(request, num_tokens)) if num_tokens else None

    def save_states(self, saves: Mapping[Request, int]) -> tuple[SavedState, ...]:
        """Takes slots for copies of states; `saves` has the tokens before each, a multiple of the block size."""
        if not self._keeps_state:
            return ()
        saved = (
            self.states.begin(request, position, self._hash_before(request, position), len(self._tables))
            for request, position in saves.items()
            if position <= request.num_tokens  # otherwise tokens before it are in flight
        )
        return tuple(state for state in saved if state is not None)

    def num_tokens_of(self, computed_blocks: Sequence[BlockId]) -> int:
        """Returns the tokens of a prefix that `get_computed_blocks` returned."""
        return len(computed_blocks) // self._num_groups * self.block_size

    def admit(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[BlockId] = (), *, is_private: bool = False
    ) -> bool:
        """Makes a table for a request that will hold at least `num_tokens` tokens.

        Without windows it holds them now; otherwise the blocks that it has not got are promised to it.

        Args:
            request: has no table yet.
            num_tokens: tokens from position 0.
            computed_blocks: the result of `get_computed_blocks`: shared instead of allocated.
            is_private: whether it shares no blocks with a window. Those that others share are not free behind the
                window, so that the promise to other requests may be too small.
        Returns: False, without a change, if the pool has too few blocks.
        """
        if not self._windowed:
            return self.allocate_slots(request, num_tokens, computed_blocks) is not None
        table = _BlockTable()
        table.block_ids += computed_blocks
        table.num_published = len(computed_blocks) // self._num_groups
        table.first = self._first_block(table.num_published)
        table.num_reserved = self._num_blocks_for(num_tokens)
        table.is_private = is_private
        in_window = self._windowed_blocks(table, table.first, table.num_published)
        table.borrowed.update(block_id for block_id in in_window if not self.pool.is_idle(block_id))
        prefix = self._held(computed_blocks, table.first)
        num_promised = self._num_outstanding(table, table.num_published)
        if num_promised > self.num_available_blocks - sum(map(self.pool.is_idle, prefix)):
            return False
        for block_id in prefix:
            self.pool.acquire(block_id)
        request.num_slots = table.num_published * self.block_size
        self._tables[request.request_id] = table
        self._promise(table, num_promised)
        return True

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[BlockId] = ()
    ) -> Sequence[BlockId] | None:
        """Extends a request's tables until they hold the first `num_tokens` tokens.

        Args:
            request: a running request, or one that is being admitted to a model without windows.
            num_tokens: tokens from position 0 that need a slot.
            computed_blocks: on admission, the result of `get_computed_blocks`: shared instead of allocated.
        Returns: the blocks appended to the tables, in the order of `block_ids`, without `computed_blocks`; None,
        without a change, if the pool has too few.
        """
        if num_tokens <= request.num_slots:
            return ()
        table = self._tables.get(request.request_id) or _BlockTable()
        pool, block_ids = self.pool, table.block_ids
        num_blocks = self._num_blocks_for(num_tokens)
        num_new_blocks = self._num_groups * num_blocks - len(block_ids) - len(computed_blocks)
        if computed_blocks:
            num_hits_taken = sum(1 for block_id in computed_blocks if pool.is_idle(block_id))
            if num_new_blocks > pool.num_free_blocks - num_hits_taken:
                return None
            for block_id in computed_blocks:
                pool.acquire(block_id)
            block_ids += computed_blocks
            table.num_published += len(computed_blocks)
        num_promised = 0
        if self._num_promised:
            # Blocks with a window must not take what is promised to the request for the rest of the full group.
            num_promised = self._num_outstanding(table, num_blocks) if table.num_promised else 0
            if num_new_blocks > self.num_available_blocks + table.num_promised - num_promised:
                return None
        new_block_ids = pool.allocate(num_new_blocks)
        if new_block_ids is None:
            assert not computed_blocks, f"{num_new_blocks} blocks needed, {pool.num_free_blocks} free"
            return None
        block_ids += new_block_ids
        request.num_slots = len(block_ids) // self._num_groups * self.block_size
        self._tables[request.request_id] = table
        if table.num_promised:
            self._promise(table, num_promised)
        return new_block_ids

    def complete(self, request: Request, num_completed_tokens: int) -> None:
        """Adds the full blocks among the first `num_completed_tokens` tokens to the prefix cache.

        Then frees those that the next token does not see. Called once the step that computed them has ended.
        """
        table = self._tables[request.request_id]
        num_full = num_completed_tokens // self.block_size
        if num_full > table.num_published and self._enable_prefix_caching:
            self._publish(request, table, num_full)
        if self._windowed and table.first < (first := self._groups.first_block(num_completed_tokens, self.block_size)):
            self._leave_behind(table, first)

    def take_events(self) -> tuple[CacheEvent, ...]:
        """Returns what entered and left the prefix cache since the last call; nothing if it is not recorded."""
        return self._events.take() if self._events is not None else ()

    def free(self, request: Request) -> None:
        """Frees all blocks of a request, if it has any, and removes it."""
        self._hashes.forget(request)
        self.states.leave(request)
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            request.num_slots = 0
            self._promise(table, 0)
            self.pool.free(self._held(table.block_ids, table.first))

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Checks the pool and the block tables against the requests.

        Raises: IntegrityError: an inconsistency, with the request and the numbers.
        """
        self.states.check_integrity()
        self.pool.check_integrity(self._held(table.block_ids, table.first) for table in self._tables.values())
        if self._tables.keys() != {request.request_id for request in running}:
            raise IntegrityError(f"{len(self._tables)} block tables for {len(running)} running requests")
        if unknown := self._hashes.others((*running, *waiting)):
            raise IntegrityError(f"hashes of finished requests {unknown}")
        num_promised = sum(table.num_promised for table in self._tables.values())
        if num_promised != self._num_promised or num_promised > self.pool.num_free_blocks:
            raise IntegrityError(
                f"{num_promised} blocks are promised, {self._num_promised} counted, {self.pool.num_free_blocks} free"
            )
        for request in running:
            self._check_table(request, self._tables[request.request_id])

    def _check_table(self, request: Request, table: _BlockTable) -> None:
        held = self._held(table.block_ids, table.first)
        if len(set(held)) != len(held):
            raise IntegrityError(f"request {request.request_id} holds a block twice: {held}")
        num_blocks = len(table.block_ids) // self._num_groups
        if request.num_slots != num_blocks * self.block_size:
            raise IntegrityError(f"request {request.request_id}: {request.num_slots} slots in {num_blocks} blocks")
        if request.num_computed_tokens > request.num_slots:
            raise IntegrityError(
                f"request {request.request_id}: {request.num_computed_tokens} tokens in {request.num_slots} slots"
            )
        if table.num_published * self.block_size > request.num_computed_tokens:
            raise IntegrityError(
                f"request {request.request_id}: {table.num_published} blocks published, "
                f"{request.num_computed_tokens} tokens computed"
            )
        if self._windowed and table.first > self._groups.first_block(request.num_computed_tokens, self.block_size):
            raise IntegrityError(
                f"request {request.request_id}: the window starts at block {table.first}, "
                f"{request.num_computed_tokens} tokens computed"
            )

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks of one group that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def _first_block(self, num_hits: int) -> int:
        """Returns the first block with a window that the token after a prefix of `num_hits` blocks sees."""
        return self._groups.first_block(num_hits * self.block_size, self.block_size) if self._windowed else 0

    def _held(self, block_ids: Sequence[BlockId], first: int) -> Sequence[BlockId]:
        """Returns the blocks of a table that a request holds; first: see `_BlockTable`."""
        num_groups, num_full = self._num_groups, self._groups.num_full
        if not first:
            return block_ids
        front = [block_ids[index * num_groups + group] for index in range(first) for group in range(num_full)]
        return front + list(block_ids[first * num_groups :])

    def _with_windows(self, full: Sequence[BlockId], hashes: Sequence[bytes]) -> list[BlockId]:
        """Returns the longest prefix whose blocks with a window are cached too, as far as its next token sees them.

        Args:
            full: cached blocks of the group without a window, if there is one.
            hashes: of the same blocks.
        """
        num_hits = index = len(hashes)
        found: dict[int, list[BlockId]] = {}  # by index of the block
        while index > self._first_block(num_hits):
            index -= 1
            block_ids = [self.pool.lookup(_key_of(hashes[index], group)) for group in self._windowed]
            found[index] = [block_id for block_id in block_ids if block_id is not None]
            if len(found[index]) < len(block_ids):
                num_hits = index
        missing = [_NO_BLOCK] * len(self._windowed)
        first = self._first_block(num_hits)
        prefix: list[BlockId] = []
        for index in range(num_hits):
            prefix += full[index : index + 1]
            prefix += found[index] if index >= first else missing
        return prefix

    def _publish(self, request: Request, table: _BlockTable, num_full: int) -> None:
        """Adds the blocks of each group up to `num_full` to the hash table."""
        hashes = self._hashes.of(request, num_full)
        num_groups = self._groups.num_full if table.is_private else self._num_groups
        for index in range(table.num_published, num_full):
            is_new = False
            for group in range(num_groups):
                block_id = table.block_ids[index * self._num_groups + group]
                is_new |= self.pool.publish(block_id, _key_of(hashes[index], group)) and group == 0
            if is_new and self._events is not None and not request.cache_salt and request.adapter is None:
                token_ids = request.token_ids(index * self.block_size, (index + 1) * self.block_size)
                self._events.store(hashes[index - 1] if index else None, hashes[index], token_ids)
        table.num_published = num_full

    def _leave_behind(self, table: _BlockTable, first: int) -> None:
        """Frees blocks in front of the window. Steps in flight do not read them: their tokens come later."""
        freed = self._windowed_blocks(table, table.first, first)
        self.pool.free(freed, is_in_use=False)
        own = (block_id for block_id in freed if block_id not in table.borrowed)
        table.num_lost += sum(not self.pool.is_idle(block_id) for block_id in own)
        table.borrowed.difference_update(freed)
        table.first = first
        self._promise(table, self._num_outstanding(table, len(table.block_ids) // self._num_groups))

    def _windowed_blocks(self, table: _BlockTable, start: int, stop: int) -> list[BlockId]:
        """Returns the blocks start to stop - 1 of the groups with a window."""
        indices = range(start, stop)
        return [table.block_ids[index * self._num_groups + group] for index in indices for group in self._windowed]

    def _num_outstanding(self, table: _BlockTable, num_blocks: int) -> int:
        """Returns the most blocks that a request with `num_blocks` of each group may still take of those reserved."""
        num_left = table.num_reserved - num_blocks
        if num_left <= 0:
            return 0
        num_windowed = len(self._windowed)
        num_own = num_windowed * (num_blocks - table.first) - len(table.borrowed)
        num_more = min(num_windowed * num_left, num_windowed * self._most_windowed - num_own - table.num_lost)
        return self._groups.num_full * num_left + max(0, num_more)

    def _promise(self, table: _BlockTable, num_blocks: int) -> None:
        self._num_promised += num_blocks - table.num_promised
        table.num_promised = num_blocks

    def _note_evicted(self, key: bytes) -> None:
        if self._events is not None and len(key) == HASH_BYTES:  # of the first group
            self._events.remove(key)

    def _hash_before(self, request: Request, num_tokens: int) -> bytes:
        """Returns the hash of the block that ends at a multiple of the block size."""
        num_blocks = num_tokens // self.block_size
        return self._hashes.of(request, num_blocks)[num_blocks - 1]


def _key_of(block_hash: bytes, group: int) -> bytes:
    """Returns the pool's key of a block: the hash and, except in the first group, the group."""
    return block_hash + bytes([group]) if group else block_hash


def make_cache(config: SchedulerConfig) -> KVCacheManager:
    """Returns an empty cache with the limits of the scheduler."""
    states = None
    if config.num_state_snapshots is not None:
        states = StateSnapshots(config.num_state_snapshots)
    return KVCacheManager(
        config.num_blocks,
        config.block_size,
        groups=config.cache_groups,
        step_tokens=config.max_tokens_in_flight,
        enable_prefix_caching=config.enable_prefix_caching,
        records_events=config.records_cache_events,
        states=states,
    )
