"""Placement follows the prefix caches that other projects' engines publish."""

import asyncio

import pytest
from smg_grpc_proto.generated import common_pb2

from frontend.routing.foreign import cache_feed
from frontend.routing.wire import ids_to_bytes
from tests.frontend.routing.foreign.conftest import KINDS
from tests.support.frontend.foreign_engine import ForeignEngine

SIZE = 16


def block(name, token_ids, **fields):
    return common_pb2.KvBlock(block_hash=name, token_ids=token_ids, block_size=len(token_ids), **fields)


def stored(*blocks, parent=None, **fields):
    message = common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=parent, **fields)
    return common_pb2.KvCacheEvent(stored=message)


def removed(*names, **fields):
    return common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=names, **fields))


def batch(sequence, *events, **fields):
    return common_pb2.KvEventBatch(sequence_number=sequence, events=events, **fields)


PROMPT = list(range(64, 64 + 4 * SIZE))
BLOCKS = [block(index, PROMPT[index * SIZE : (index + 1) * SIZE]) for index in range(4)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Starts again without a pause."""
    monkeypatch.setattr(cache_feed, "_RETRY_S", 0.0)


@pytest.fixture(params=KINDS)
def engine(request):
    return ForeignEngine(kind=request.param, cache_events=asyncio.Queue())


async def until_cached(world, engine, num_tokens, prompt=PROMPT):
    """Waits until the frontend thinks that an engine has so many tokens of the prompt."""
    connection = world.app.engines._connections[world.addresses[world.engines.index(engine)]]
    blocks = connection.attachment.cached_blocks
    await world.until(lambda: blocks.num_cached_tokens(ids_to_bytes(prompt)) == num_tokens)
    return blocks


async def test_blocks_come_go_and_are_cleared(make_foreign, engine):
    world = await make_foreign(engine)
    engine.cache_events.put_nowait(batch(7, stored(*BLOCKS[:2]), stored(*BLOCKS[2:], parent=1)))
    blocks = await until_cached(world, engine, 4 * SIZE)
    assert blocks.is_followed
    engine.cache_events.put_nowait(batch(8, removed(2)))
    await until_cached(world, engine, 2 * SIZE)
    heartbeat = batch(8, load=common_pb2.EngineLoad(load_only=True))
    for each in (heartbeat, batch(9, stored(BLOCKS[2], parent=1))):
        engine.cache_events.put_nowait(each)
    await until_cached(world, engine, 4 * SIZE)
    engine.cache_events.put_nowait(batch(10, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())))
    await until_cached(world, engine, 0)
    assert engine.num_subscriptions == 1


@pytest.mark.parametrize(
    "event",
    [
        stored(BLOCKS[0], lora_name="a"),
        stored(BLOCKS[0], cache_salt="a"),
        stored(BLOCKS[0], tier=common_pb2.KV_CACHE_TIER_HOST),
        stored(BLOCKS[0], locality=common_pb2.KV_CACHE_LOCALITY_REMOTE),
        stored(BLOCKS[0], kv_cache_spec_sliding_window=512),
        stored(block(0, PROMPT[:SIZE], lora_id=1)),
        stored(block(0, PROMPT[:SIZE], cache_level=1)),
        stored(block(0, PROMPT[:SIZE], extra_keys=[common_pb2.KvBlockExtraKey(text="a")])),
    ],
    ids=str,
)
async def test_blocks_that_a_plain_request_does_not_find_are_left_out(make_foreign, event):
    engine = ForeignEngine(cache_events=asyncio.Queue())
    world = await make_foreign(engine)
    other = [1] * SIZE
    engine.cache_events.put_nowait(batch(1, event, stored(block(9, other))))
    blocks = await until_cached(world, engine, SIZE, other)
    assert len(blocks) == 1
    engine.cache_events.put_nowait(
        batch(2, removed(9, tier=common_pb2.KV_CACHE_TIER_HOST), stored(block(8, [2] * SIZE)))
    )
    await until_cached(world, engine, SIZE, [2] * SIZE)
    assert len(blocks) == 2  # the copy on the device is still there


@pytest.mark.parametrize("next_batch", [batch(9), None], ids=["gap", "end"])
async def test_after_a_gap_or_an_end_it_starts_again_with_nothing(make_foreign, next_batch):
    engine = ForeignEngine(cache_events=asyncio.Queue())
    world = await make_foreign(engine)
    engine.cache_events.put_nowait(batch(7, stored(*BLOCKS)))
    blocks = await until_cached(world, engine, 4 * SIZE)
    engine.cache_events.put_nowait(next_batch)
    await until_cached(world, engine, 0)
    await engine.wait_for(lambda: engine.num_subscriptions == 2)
    assert not blocks.is_followed
    engine.cache_events.put_nowait(batch(30, stored(BLOCKS[0])))
    await until_cached(world, engine, SIZE)


async def test_an_engine_without_events_is_asked_once(make_foreign, caplog):
    caplog.set_level("INFO")
    engine = ForeignEngine()
    world = await make_foreign(engine)
    await world.until(lambda: "does not publish its prefix cache" in caplog.text)
    assert engine.num_subscriptions == 1
    assert next(record for record in caplog.records if "prefix cache" in record.message).levelname == "INFO"


async def test_a_request_goes_where_its_prompt_is_cached(make_foreign, text_request, encode):
    engines = [ForeignEngine(cache_events=asyncio.Queue()) for _ in range(3)]
    world = await make_foreign(*engines)
    texts = [f"Story {number}: the fox and the miller of the village" for number in range(3)]
    for engine, text in zip(engines, texts, strict=True):
        prompt = encode(text)
        parts = [prompt[start : start + SIZE] for start in range(0, len(prompt) - SIZE + 1, SIZE)]
        engine.cache_events.put_nowait(batch(1, stored(*(block(index, part) for index, part in enumerate(parts)))))
        await until_cached(world, engine, len(parts) * SIZE, prompt)
    for number in (2, 2, 0, 1, 0):
        before = len(engines[number].requests)
        await world.stub.Generate(text_request(texts[number], max_tokens=1))
        assert len(engines[number].requests) == before + 1
