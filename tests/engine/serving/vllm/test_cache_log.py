"""Subscribers get what the cache holds, then each change without a gap, or are told to start again."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from engine.core.cache_events import BlocksRemoved, BlocksStored
from engine.serving.client_errors import CallRefused
from engine.serving.vllm import cache_log
from engine.serving.vllm.cache_log import CacheLog
from tests.hang import HANG_S

FIRST = 10_000


def hash_of(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True) + bytes(24)


def stored(*numbers: int, parent: int | None = None) -> BlocksStored:
    """Blocks of two tokens: n and n + 1."""
    token_ids = tuple(token_id for number in numbers for token_id in (number, number + 1))
    return BlocksStored(None if parent is None else hash_of(parent), tuple(map(hash_of, numbers)), token_ids)


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved(tuple(map(hash_of, numbers)))


async def take(batches: AsyncIterator[Any], number: int) -> list[Any]:
    return [await asyncio.wait_for(anext(batches), HANG_S) for _ in range(number)]


def held_after(batches: Iterable[Any], held: dict[int, tuple[int | None, tuple[int, ...]]] | None = None) -> Any:
    """What a subscriber knows: by block, its parent and its tokens."""
    held = {} if held is None else held
    for batch in batches:
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    held.clear()
                case "stored":
                    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                    for block in event.stored.blocks:
                        assert block.block_size == 2
                        held[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del held[block_hash]
    return held


async def test_a_subscriber_gets_what_is_there_and_then_each_change() -> None:
    log = CacheLog(FIRST)
    log.add([stored(1, 2), stored(9)])
    batches = log.follow(0)
    (snapshot,) = await take(batches, 1)
    assert (snapshot.sequence_number, snapshot.snapshot.count, snapshot.snapshot.blocks) == (FIRST + 1, 1, 3)
    held = held_after([snapshot])
    assert held == {1: (None, (1, 2)), 2: (1, (2, 3)), 9: (None, (9, 10))}
    log.add([stored(3, parent=2), removed(9)])
    log.add([stored(40)])
    later = await take(batches, 2)
    assert [batch.sequence_number for batch in later] == [FIRST + 2, FIRST + 3]
    expected = {1: (None, (1, 2)), 2: (1, (2, 3)), 3: (2, (3, 4)), 40: (None, (40, 41))}
    assert held_after(later, held) == expected


async def test_the_name_of_a_block_is_the_beginning_of_its_hash_as_a_signed_integer() -> None:
    log = CacheLog(FIRST)
    log.add([BlocksStored(None, (b"\xff" * 7 + b"\xfe" + b"\x55" * 24,), (1, 2))])
    assert held_after(await take(log.follow(0), 1)).keys() == {-2}


async def test_removals_of_unknown_blocks_are_not_sent() -> None:
    log = CacheLog(FIRST)
    log.add([removed(5)])
    log.add([stored(1), removed(6)])
    assert log.num_blocks == 1
    (batch,) = await take(log.follow(FIRST), 1)
    assert batch.sequence_number == FIRST + 1
    assert [event.WhichOneof("data") for event in batch.events] == ["stored"]


async def test_a_subscriber_goes_on_from_its_cursor() -> None:
    log = CacheLog(FIRST)
    for number in range(5):
        log.add([stored(number)])
    batches = await take(log.follow(FIRST + 3), 2)
    assert [batch.sequence_number for batch in batches] == [FIRST + 4, FIRST + 5]
    assert not any(batch.HasField("snapshot") for batch in batches)


@pytest.mark.parametrize("start", [1, FIRST + 1, FIRST + 100])
async def test_a_cursor_that_cannot_be_continued_is_out_of_range(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "MAX_BATCHES", 3)
    log = CacheLog(FIRST)
    for number in range(5):
        log.add([stored(number)])
    with pytest.raises(CallRefused) as refusal:
        await take(log.follow(start), 1)
    assert refusal.value.code is grpc.StatusCode.OUT_OF_RANGE
    assert str(start) in refusal.value.detail


async def test_a_subscriber_that_falls_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "MAX_BATCHES", 3)
    log = CacheLog(FIRST)
    batches = log.follow(0)
    await take(batches, 1)
    for number in range(4):
        log.add([stored(number)])
    with pytest.raises(CallRefused) as refusal:
        await take(batches, 1)
    assert refusal.value.code is grpc.StatusCode.DATA_LOSS


async def test_a_large_snapshot_comes_in_parts_with_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_log, "SNAPSHOT_BLOCKS", 4)
    log = CacheLog(FIRST)
    log.add([stored(1, 2, 3, 4, 5, 6)])
    log.add([removed(1, 2)])
    log.add([stored(1, 2), stored(7, parent=6), stored(8, 9)])  # 3 is older than its parent now
    chunks = await take(log.follow(0), 3)
    assert [chunk.sequence_number for chunk in chunks] == [FIRST + 1, FIRST + 2, FIRST + 3]
    assert [(chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) for chunk in chunks] == [
        (0, 3, 9),
        (1, 3, 9),
        (2, 3, 9),
    ]
    order = [
        event.stored.blocks[0].block_hash for chunk in chunks for event in chunk.events if event.HasField("stored")
    ]
    held = held_after(chunks)
    assert held == {n: (None if n in (1, 8) else n - 1, (n, n + 1)) for n in range(1, 10)}
    assert all(parent is None or order.index(parent) < order.index(name) for name, (parent, _) in held.items())


async def test_the_end_of_the_log_ends_its_subscriptions() -> None:
    log = CacheLog(FIRST)
    batches = log.follow(0)
    await take(batches, 1)
    log.close()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(anext(batches), HANG_S)


async def test_numbers_of_two_starts_do_not_overlap() -> None:
    first = CacheLog()
    first.add([stored(1)])
    (batch,) = await take(first.follow(0), 1)
    with pytest.raises(CallRefused, match="start_sequence_number"):
        await take(CacheLog().follow(batch.sequence_number - 10), 1)
