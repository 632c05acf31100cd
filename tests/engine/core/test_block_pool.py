import pytest

from engine.core.block_pool import BlockPool
from engine.core.request import BlockId
from engine.errors import IntegrityError


def allocate(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def allocate_published(pool: BlockPool, *hashes: bytes) -> list[BlockId]:
    block_ids = allocate(pool, len(hashes))
    for block_id, block_hash in zip(block_ids, hashes, strict=True):
        pool.publish(block_id, block_hash)
    return block_ids


def test_allocate_returns_none_and_changes_nothing_when_there_is_no_room() -> None:
    pool = BlockPool(3)
    table = allocate(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free_blocks == 1
    pool.check_integrity([table])


def test_freed_blocks_stay_cached_until_they_are_reused() -> None:
    pool = BlockPool(2)
    table = allocate_published(pool, b"head", b"tail")
    pool.free(table)
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (2, 2)
    assert pool.lookup(b"head") == table[0]
    allocate(pool, 2)
    assert pool.lookup(b"head") is None
    assert pool.lookup(b"tail") is None


def test_worthless_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(2)
    pool.free(allocate_published(pool, b"a"))
    allocate(pool, 1)
    assert pool.lookup(b"a") is not None


def test_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    pool.free(allocate_published(pool, b"head", b"middle", b"tail"))
    allocate(pool, 1)
    assert pool.lookup(b"tail") is None
    allocate(pool, 1)
    assert pool.lookup(b"middle") is None
    assert pool.lookup(b"head") is not None


def test_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(2)
    old = allocate_published(pool, b"old")
    pool.free(old)
    pool.free(allocate_published(pool, b"new"))
    pool.acquire(old[0])  # used again
    pool.free(old)
    allocate(pool, 1)
    assert pool.lookup(b"old") is not None
    assert pool.lookup(b"new") is None


def test_shared_block_is_idle_only_when_its_last_owner_is_gone() -> None:
    pool = BlockPool(1)
    table = allocate_published(pool, b"a")
    pool.acquire(table[0])
    pool.check_integrity([table, table])
    pool.free(table)
    assert pool.num_free_blocks == 0
    pool.free(table)
    assert pool.num_free_blocks == 1


def test_first_of_two_equal_blocks_stays_in_the_table() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.lookup(b"same") == first
    pool.free([second])
    assert pool.num_cached_blocks == 0  # a copy is worth nothing


def test_block_is_reusable_only_after_the_steps_issued_before_its_free_have_ended() -> None:
    pool = BlockPool(1)
    table = allocate(pool, 1)
    pool.begin_step(1)
    pool.begin_step(2)
    pool.free(table)
    assert (pool.num_free_blocks, pool.num_deferred_blocks) == (0, 1)
    pool.end_step(1)
    assert pool.allocate(1) is None
    pool.begin_step(3)  # issued after the free: cannot touch the block
    pool.end_step(2)
    assert pool.allocate(1) == table


def test_block_is_reusable_at_once_when_no_step_is_in_flight() -> None:
    pool = BlockPool(1)
    table = allocate(pool, 1)
    pool.begin_step(1)
    pool.end_step(1)
    pool.free(table)
    assert pool.allocate(1) == table


def test_deferred_block_can_be_hit_and_is_then_owned() -> None:
    pool = BlockPool(2)
    table = allocate_published(pool, b"a")
    pool.begin_step(1)
    pool.free(table)
    pool.acquire(table[0])
    assert pool.num_deferred_blocks == 0
    pool.end_step(1)
    assert pool.num_free_blocks == 1
    pool.check_integrity([table])


def test_block_freed_again_waits_for_the_newer_step() -> None:
    pool = BlockPool(1)
    table = allocate_published(pool, b"a")
    pool.begin_step(1)
    pool.free(table)
    pool.acquire(table[0])
    pool.begin_step(2)
    pool.free(table)
    pool.end_step(1)
    assert (pool.num_free_blocks, pool.num_deferred_blocks) == (0, 1)
    pool.end_step(2)
    assert pool.num_free_blocks == 1


def test_steps_end_in_order() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="step 1 ended, but is not in flight"):
        pool.end_step(1)
    pool.begin_step(1)
    with pytest.raises(AssertionError, match="step 1 began after step 1"):
        pool.begin_step(1)


def test_check_integrity_names_a_wrong_reference_count() -> None:
    pool = BlockPool(2)
    table = allocate(pool, 1)
    with pytest.raises(IntegrityError, match=f"block {table[0]}: reference count 1, in 0 tables"):
        pool.check_integrity([])


def test_check_integrity_notices_a_leaked_block() -> None:
    pool = BlockPool(2)
    pool._free.pop()
    with pytest.raises(IntegrityError, match=r"owned 0 \+ cached 0 \+ free 1 \+ deferred 0 != 2"):
        pool.check_integrity([])


def test_check_integrity_notices_sharing_of_an_unpublished_block() -> None:
    pool = BlockPool(1)
    table = allocate(pool, 1)
    pool._ref_counts[table[0]] += 1
    with pytest.raises(IntegrityError, match="2 owners but was never published"):
        pool.check_integrity([table, table])


def test_check_integrity_notices_a_block_in_two_states_while_another_is_in_none() -> None:
    pool = BlockPool(3)
    table = allocate(pool, 1)
    pool._free[-1] = table[0]
    with pytest.raises(IntegrityError, match=r"is in [02] states at once"):
        pool.check_integrity([table])


def test_check_integrity_notices_a_block_in_more_tables_than_it_counts() -> None:
    pool = BlockPool(2)
    table = allocate(pool, 1)
    with pytest.raises(IntegrityError, match="in 2 tables"):
        pool.check_integrity([table, table])


@pytest.mark.parametrize("wrong", ["no queue", "which has ended"])
def test_check_integrity_notices_a_block_that_waits_in_vain(wrong: str) -> None:
    pool = BlockPool(2)
    table = allocate(pool, 1)
    pool.begin_step(1)
    pool.free(table)
    if wrong == "no queue":
        pool._deferred.clear()
    else:
        pool._last_ended_step = 1
    with pytest.raises(IntegrityError, match=f"block {table[0]} waits for step 1.*{wrong}"):
        pool.check_integrity([])


def test_check_integrity_notices_a_hash_that_names_another_block_and_a_worthless_block_among_the_cached() -> None:
    pool = BlockPool(3)
    table = allocate(pool, 1)
    pool.publish(table[0], b"hash")
    pool.free(table)
    pool._block_by_hash[b"hash"] = pool._free[0]
    with pytest.raises(IntegrityError, match=f"block {table[0]} has a hash that names another block"):
        pool.check_integrity([])
    pool._block_by_hash.clear()
    pool._hashes[table[0]] = None
    with pytest.raises(IntegrityError, match=f"block {table[0]} is idle in the wrong list"):
        pool.check_integrity([])
