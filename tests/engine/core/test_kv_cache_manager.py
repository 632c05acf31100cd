from collections.abc import Callable

import pytest

from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Adapter, Request
from engine.errors import IntegrityError

MakeRequest = Callable[..., Request]
BLOCK_SIZE = 4


@pytest.fixture
def manager() -> KVCacheManager:
    return KVCacheManager(num_blocks=8, block_size=BLOCK_SIZE)


def compute(manager: KVCacheManager, request: Request) -> None:
    """As if the whole prompt had been admitted, computed and landed."""
    assert manager.allocate_slots(request, request.num_tokens, manager.get_computed_blocks(request)) is not None
    request.num_computed_tokens = request.num_tokens
    manager.complete(request, request.num_tokens)


def test_allocate_slots_appends_blocks_only_when_the_table_is_full(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request(1, 4)
    assert len(manager.allocate_slots(request, 4) or ()) == 1
    assert len(manager.allocate_slots(request, 5) or ()) == 1
    assert [manager.allocate_slots(request, n) for n in (6, 7, 8)] == [(), (), ()]
    assert len(manager.block_ids(request)) == 2


def test_allocate_slots_returns_none_and_changes_nothing_when_there_is_no_room(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    old, new = make_request(1, 8), make_request(2, 40)
    compute(manager, old)
    manager.free(old)
    hits = manager.get_computed_blocks(new)
    assert len(hits) == 2
    assert manager.allocate_slots(new, 40, hits) is None
    assert manager.pool.num_free_blocks == 8
    manager.check_integrity([], [new])


def test_hits_on_idle_blocks_reduce_the_free_blocks(manager: KVCacheManager, make_request: MakeRequest) -> None:
    old, other, new = make_request(1, 8), make_request(2, [2] * 16), make_request(3, 20)
    compute(manager, old)
    manager.free(old)
    compute(manager, other)
    assert manager.pool.num_free_blocks == 4  # of which the new request hits two and needs three more
    assert manager.allocate_slots(new, 20, manager.get_computed_blocks(new)) is None
    manager.check_integrity([other], [new])


def test_equal_prefixes_share_their_full_blocks(manager: KVCacheManager, make_request: MakeRequest) -> None:
    first, second = make_request(1, [1] * 8 + [2]), make_request(2, [1] * 8 + [3, 3])
    compute(manager, first)
    assert manager.get_computed_blocks(second) == list(manager.block_ids(first)[:2])
    compute(manager, second)
    assert manager.block_ids(second)[:2] == manager.block_ids(first)[:2]
    assert manager.block_ids(second)[2] != manager.block_ids(first)[2]
    manager.check_integrity([first, second], [])


def test_at_least_one_token_is_left_to_compute(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request(1, 8))
    assert len(manager.get_computed_blocks(make_request(2, 8))) == 1
    assert len(manager.get_computed_blocks(make_request(3, 9))) == 2
    assert len(manager.get_computed_blocks(make_request(4, 1))) == 0


def test_partial_blocks_are_never_shared(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request(1, 7))
    assert len(manager.get_computed_blocks(make_request(2, 7))) == 1


def test_other_salts_see_nothing(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request(1, 8, cache_salt=b"a"))
    assert manager.get_computed_blocks(make_request(2, 9, cache_salt=b"b")) == []
    assert manager.get_computed_blocks(make_request(3, 9)) == []
    assert len(manager.get_computed_blocks(make_request(4, 9, cache_salt=b"a"))) == 2


def test_equal_blocks_behind_different_prefixes_differ(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request(1, [1] * 4 + [2] * 4))
    assert manager.get_computed_blocks(make_request(2, [2] * 8)) == []
    assert len(manager.get_computed_blocks(make_request(3, [1] * 4 + [3] * 4 + [2]))) == 1


def test_output_of_one_request_is_a_prefix_for_the_next(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request(1, 6, output_ids=[2, 2, 2])
    compute(manager, request)
    assert len(manager.get_computed_blocks(make_request(2, [1] * 6 + [2, 2, 3]))) == 2


def test_publish_hides_blocks_until_their_tokens_have_landed(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    request = make_request(1, 12)
    manager.allocate_slots(request, 12)
    manager.complete(request, 7)
    assert len(manager.get_computed_blocks(make_request(2, 12))) == 1


def test_equal_blocks_computed_at_the_same_time_are_both_kept(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    twins = [make_request(1, 8), make_request(2, 8)]
    for twin in twins:
        manager.allocate_slots(twin, 8)
        twin.num_computed_tokens = 8
    for twin in twins:
        manager.complete(twin, 8)
    third = make_request(3, 9)
    assert manager.get_computed_blocks(third) == list(manager.block_ids(twins[0]))
    manager.check_integrity(twins, [third])
    manager.free(twins[0])
    manager.free(twins[1])
    assert manager.pool.num_free_blocks == 8


def test_nothing_is_shared_without_prefix_caching(make_request: MakeRequest) -> None:
    manager = KVCacheManager(num_blocks=8, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    compute(manager, make_request(1, 8))
    assert manager.get_computed_blocks(make_request(2, 9)) == []


def test_free_forgets_everything_about_a_request(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request(1, 8)
    compute(manager, request)
    manager.free(request)
    manager.free(request)  # one without blocks is fine
    manager.check_integrity([], [])
    assert manager.pool.num_free_blocks == 8


def test_check_integrity_notices_a_table_without_a_request(manager: KVCacheManager, make_request: MakeRequest) -> None:
    compute(manager, make_request(1, 8))
    with pytest.raises(IntegrityError, match="1 block tables for 0 running requests"):
        manager.check_integrity([], [])


def test_check_integrity_notices_hashes_of_a_forgotten_request(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    manager.get_computed_blocks(make_request(7, 9))
    with pytest.raises(IntegrityError, match=r"hashes of finished requests \[7\]"):
        manager.check_integrity([], [])


def test_check_integrity_notices_tokens_beyond_the_table(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request(1, 8)
    compute(manager, request)
    request.num_computed_tokens = 9
    with pytest.raises(IntegrityError, match="9 tokens in 8 slots"):
        manager.check_integrity([request], [])


def test_check_integrity_notices_a_wrong_number_of_slots(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request(1, 8)
    compute(manager, request)
    request.num_slots = 12
    with pytest.raises(IntegrityError, match="request 1: 12 slots in 2 blocks"):
        manager.check_integrity([request], [])


def test_hits_in_use_need_no_free_block(make_request: MakeRequest) -> None:
    manager = KVCacheManager(num_blocks=3, block_size=BLOCK_SIZE)
    compute(manager, make_request(1, 8))
    twin = make_request(2, 9)
    hits = manager.get_computed_blocks(twin)
    assert len(hits) == 2
    assert len(manager.allocate_slots(twin, 9, hits) or ()) == 1  # the only free block


def test_published_tokens_are_those_of_full_blocks(manager: KVCacheManager, make_request: MakeRequest) -> None:
    request = make_request(1, 11)
    compute(manager, request)
    assert manager.num_published_tokens(request) == 8


def test_adapters_share_no_blocks_with_others_nor_with_the_base_model(
    manager: KVCacheManager, make_request: MakeRequest
) -> None:
    one, other = Adapter(0, b"1" * 32), Adapter(0, b"2" * 32)
    first = make_request(1, 9)
    first.adapter = one
    compute(manager, first)
    for request_id, adapter, salt, num_shared in (
        (2, one, b"", 2),
        (3, None, b"", 0),
        (4, other, b"", 0),
        (5, one, b"salt", 0),
        (6, Adapter(7, one.digest), b"", 2),  # another place among the adapters of an engine
    ):
        request = make_request(request_id, 9)
        request.adapter, request.cache_salt = adapter, salt
        assert len(manager.get_computed_blocks(request)) == num_shared, request_id
