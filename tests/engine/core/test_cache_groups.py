"""Block tables of models with sliding windows."""

from collections.abc import Callable, Sequence

import pytest

from engine.core.block_pool import BlockPool
from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request

MakeRequest = Callable[..., Request]
WINDOW = 8
GROUPS = CacheGroups(num_full=1, num_windowed=2, window=WINDOW)
STEP_TOKENS = 4


def make_manager(num_blocks: int, groups: CacheGroups = GROUPS) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, groups=groups, step_tokens=STEP_TOKENS)


def compute(manager: KVCacheManager, request: Request, num_tokens: int, waiting: Sequence[Request] = ()) -> None:
    """Computes a request up to so many tokens, in steps of four, one in flight."""
    while request.num_computed_tokens < num_tokens:
        advance(manager, request, min(request.num_computed_tokens + STEP_TOKENS, num_tokens))
        manager.check_integrity([request], waiting)


def advance(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Computes a request up to so many tokens in one step."""
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    manager.complete(request, num_tokens)


def admit(manager: KVCacheManager, request: Request, **options: bool) -> bool:
    """Admits a request to its cached prefix."""
    prefix = manager.get_computed_blocks(request, **options)
    is_admitted = manager.admit(request, request.num_tokens, prefix, **options)
    if is_admitted:
        request.num_computed_tokens = manager.num_tokens_of(prefix)
    return is_admitted


@pytest.mark.parametrize("groups", [ONE_GROUP, GROUPS, CacheGroups(0, 1, 33), CacheGroups(1, 1, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_longest_request_is_the_longest_that_fits(groups: CacheGroups, block_size: int) -> None:
    for num_blocks in range(1, 120):
        longest = groups.longest(num_blocks, 7, block_size)
        if longest is None:
            assert groups.most_blocks(10**6, 7, block_size) <= num_blocks
        else:
            assert groups.most_blocks(longest, 7, block_size) <= num_blocks
            assert groups.most_blocks(longest + 1, 7, block_size) > num_blocks


def test_a_long_request_holds_all_blocks_of_full_layers_and_a_window_of_the_others(make_request: MakeRequest) -> None:
    request = make_request(1, 100)
    num_most = GROUPS.most_blocks(100, STEP_TOKENS, 4)
    manager = make_manager(num_most)
    assert admit(manager, request)
    compute(manager, request, 100)
    # the next token, at position 100, sees positions from 93 on, the second of block 23
    assert num_most - manager.pool.num_free_blocks == 25 + 2 * 2
    assert num_most == 25 + 2 * 5


def test_blocks_that_are_promised_go_to_no_one_else(make_request: MakeRequest) -> None:
    first, second = make_request(1, 40), make_request(2, [2] * 40)
    num_most = GROUPS.most_blocks(40, STEP_TOKENS, 4)
    manager = make_manager(2 * num_most - 1)
    assert admit(manager, first)
    assert manager.pool.num_free_blocks == 2 * num_most - 1  # it holds nothing yet
    assert not admit(manager, second)
    compute(manager, first, 40, [second])
    assert admit(manager, second)  # what is behind the window is free


def test_a_prefix_needs_its_window_only(make_request: MakeRequest) -> None:
    manager = make_manager(60)
    old, new = make_request(1, 40), make_request(2, 40)
    assert admit(manager, old)
    compute(manager, old, 40)
    assert manager.pool.num_cached_blocks == 2 * 8  # blocks 0 to 7 of the groups with a window
    manager.free(old)
    assert manager.pool.allocate(60 - 10 - 2 * 3) is not None  # all but the full group's and three of each window's
    prefix = manager.get_computed_blocks(new)
    assert manager.num_tokens_of(prefix) == 36
    assert len(prefix) == 9 * 3


def test_without_a_block_of_its_window_a_prefix_is_shorter(make_request: MakeRequest) -> None:
    manager = make_manager(60)
    old, new = make_request(1, 40), make_request(2, 40)
    assert admit(manager, old)
    compute(manager, old, 40)
    manager.free(old)
    whole = manager.get_computed_blocks(new)
    assert manager.num_tokens_of(whole) == 36
    lost = whole[8 * 3 + 1]  # block 8 of the second group
    while manager.pool.is_idle(lost):  # the least recently used ones first
        assert manager.pool.allocate(1) is not None
    assert manager.num_tokens_of(manager.get_computed_blocks(new)) < 36


def test_a_private_request_keeps_its_promise_beside_one_with_the_same_prompt(make_request: MakeRequest) -> None:
    one, twin = make_request(1, 60), make_request(2, 60)
    manager = make_manager(2 * GROUPS.most_blocks(60, STEP_TOKENS, 4))
    assert admit(manager, one, is_private=True)
    compute(manager, one, 4)
    assert manager.get_computed_blocks(twin) == []  # of the full group a block is cached, of the others none
    assert admit(manager, twin)
    assert manager.pool.allocate(manager.num_available_blocks) is not None  # all that is promised to no one
    for stop in range(8, 61, 4):
        advance(manager, one, stop)


def test_blocks_with_a_window_take_nothing_that_is_promised_for_the_full_group(make_request: MakeRequest) -> None:
    """Others share what the request leaves behind its window, so that it lacks blocks for the next tokens."""
    one = make_request(1, [1] * 60)
    twins = [make_request(2, [1] * 20 + [2] * 4), make_request(3, [1] * 28 + [2] * 4)]
    manager = make_manager(100)
    assert admit(manager, one)
    for twin in twins:
        while one.num_computed_tokens < twin.num_tokens - 4:
            advance(manager, one, one.num_computed_tokens + 4)
        assert admit(manager, twin)
        assert manager.num_tokens_of(manager.get_computed_blocks(twin)) == twin.num_tokens - 4
    for _ in range(2):
        advance(manager, one, one.num_computed_tokens + 4)
    assert manager.pool.allocate(manager.num_available_blocks) is not None  # all that is promised to no one
    assert manager.num_missing_blocks(one, one.num_computed_tokens + 4) == 2
    assert manager.allocate_slots(one, one.num_computed_tokens + 4) is None
    assert manager.num_available_blocks == 0


def test_a_block_that_a_step_still_reads_for_a_former_owner_is_deferred() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1) or ()
    pool.publish(block_id, b"prefix")
    pool.acquire(block_id)
    pool.begin_step(1)
    pool.free([block_id])  # one owner is cancelled while its row is in flight
    pool.free([block_id], is_in_use=False)  # the other one's window has passed it
    assert not pool.is_idle(block_id)
    assert pool.num_deferred_blocks == 1
    pool.end_step(1)
    assert pool.is_idle(block_id)


def test_a_block_behind_the_window_of_its_only_owner_is_free_at_once() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1) or ()
    pool.begin_step(1)
    pool.free(block_ids, is_in_use=False)
    assert pool.num_free_blocks == 2
