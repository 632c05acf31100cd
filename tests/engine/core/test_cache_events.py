"""Recorded events, replayed, give what the prefix cache holds."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from engine.core.cache_events import BlocksRemoved, BlocksStored, CacheEventRecorder
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Adapter, Request

MakeRequest = Callable[..., Request]
BLOCK_SIZE = 4


def compute(manager: KVCacheManager, request: Request) -> None:
    """As if the whole prompt had been admitted, computed and landed."""
    assert manager.allocate_slots(request, request.num_tokens, manager.get_computed_blocks(request)) is not None
    request.num_computed_tokens = request.num_tokens
    manager.complete(request, request.num_tokens)


def test_consecutive_blocks_share_an_event_and_name_their_parent(make_request: MakeRequest) -> None:
    manager = KVCacheManager(8, BLOCK_SIZE, records_events=True)
    compute(manager, make_request(1, list(range(9))))
    (first,) = manager.take_events()
    assert isinstance(first, BlocksStored)
    assert (first.parent, first.token_ids, len(first.hashes)) == (None, tuple(range(8)), 2)
    compute(manager, make_request(2, [*range(8), 50, 51, 52, 53, 54]))
    (second,) = manager.take_events()
    assert second == BlocksStored(first.hashes[1], (second.hashes[0],), (50, 51, 52, 53))
    assert manager.take_events() == ()


def test_an_equal_block_is_stored_once(make_request: MakeRequest) -> None:
    manager = KVCacheManager(8, BLOCK_SIZE, records_events=True)
    twins = [make_request(number, [7] * 5) for number in (1, 2)]
    for twin in twins:  # both are computed at the same time
        manager.allocate_slots(twin, 5)
    for twin in twins:
        twin.num_computed_tokens = 5
        manager.complete(twin, 5)
    assert [type(event) for event in manager.take_events()] == [BlocksStored]


def test_blocks_that_others_cannot_hit_are_not_stored(make_request: MakeRequest) -> None:
    manager = KVCacheManager(8, BLOCK_SIZE, records_events=True)
    compute(manager, make_request(1, [1] * 4, cache_salt=b"salt"))
    compute(manager, make_request(2, [1] * 4, adapter=Adapter(0, b"digest")))
    assert manager.take_events() == ()


def test_removals_follow_what_was_stored_before(make_request: MakeRequest) -> None:
    manager = KVCacheManager(2, BLOCK_SIZE, records_events=True)
    old, new = make_request(1, [1] * 8), make_request(2, [2] * 8)
    compute(manager, old)
    manager.free(old)
    compute(manager, new)
    stored, removed, stored_again = manager.take_events()
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert set(removed.hashes) == set(stored.hashes)
    assert isinstance(stored_again, BlocksStored)


def test_a_recorder_keeps_the_order_of_stores_and_removals() -> None:
    recorder = CacheEventRecorder()
    recorder.store(None, b"a", [1])
    recorder.store(b"a", b"b", [2])
    recorder.remove(b"a")
    recorder.remove(b"b")
    recorder.store(b"x", b"c", [3])
    recorder.store(b"y", b"d", [4])
    assert recorder.take() == (
        BlocksStored(None, (b"a", b"b"), (1, 2)),
        BlocksRemoved((b"a", b"b")),
        BlocksStored(b"x", (b"c",), (3,)),
        BlocksStored(b"y", (b"d",), (4,)),
    )


def test_random_operations_replayed_give_what_the_pool_holds_without_a_salt(simulate: Callable[..., Any]) -> None:
    num_removed = 0
    for seed in range(40):
        world = simulate(seed, 250, records_cache_events=True)
        held: dict[bytes, tuple[int, ...]] = {}
        for event in world.scheduler.take_cache_events():
            if isinstance(event, BlocksRemoved):
                num_removed += sum(held.pop(block_hash, None) is not None for block_hash in event.hashes)
                continue
            size = world.config.block_size
            assert len(event.token_ids) == size * len(event.hashes)
            for index, block_hash in enumerate(event.hashes):
                assert block_hash not in held
                held[block_hash] = event.token_ids[index * size : (index + 1) * size]
        requests = [expectation.request for expectation in world.expectations.values()]
        possible = {name: ids for request in requests for name, ids in blocks_of(request, world.config.block_size)}
        found = world.scheduler._cache.pool._block_by_hash.keys()
        assert held == {name: ids for name, ids in possible.items() if name in found}
    assert num_removed > 100


def blocks_of(request: Request, block_size: int) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """The hashes of a request's full blocks, as docs/architecture.md defines them, with their tokens."""
    token_ids, block_hash = [*request.prompt_ids, *request.output_ids], hashlib.sha256(b"chairlift kv").digest()
    for start in range(0, 0 if request.cache_salt else len(token_ids) - block_size + 1, block_size):
        block = tuple(token_ids[start : start + block_size])
        block_hash = hashlib.sha256(
            block_hash + b"".join(token_id.to_bytes(4, "little") for token_id in block)
        ).digest()
        yield block_hash, block
