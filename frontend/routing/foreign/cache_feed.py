"""Follows the prefix cache of an engine by the events that it publishes, for placement."""

import asyncio
import logging
from typing import Any

import grpc

from frontend.routing.cached_blocks import CachedBlocks
from frontend.routing.foreign.dialect import Dialect
from frontend.routing.wire import ids_to_bytes

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_DEVICE_TIERS = (0, 1)  # unspecified, device
_REMOTE = 2
_NOT_PUBLISHED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)


class _GapError(Exception):
    """Events are missing."""


async def follow_cache(dialect: Dialect, blocks: CachedBlocks, address: str) -> None:
    """Keeps `blocks` as the engine's events say, until it is cancelled or the engine turns out to publish none.

    After an interruption or a gap it starts again with nothing: a block that is thought to be cached and is not would
    attract requests for no gain.

    Args:
        dialect: speaks to the engine.
        blocks: `is_followed` says whether they can be used.
        address: the engine's, for logs.
    """
    while True:
        try:
            await _follow(dialect, blocks)
            reason = "the stream has ended"
        except _GapError as error:
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            if error.code() in _NOT_PUBLISHED:
                logger.info("engine %s does not publish its prefix cache (%s)", address, error.details())
                return
        finally:
            blocks.is_followed = False
            blocks.clear()
        logger.debug("engine %s: events of its prefix cache start again: %s", address, reason)
        await asyncio.sleep(_RETRY_S)


async def _follow(dialect: Dialect, blocks: CachedBlocks) -> None:
    sequences: dict[int, int] = {}  # of the last batch, by data-parallel rank
    call = dialect.cache_events()
    try:
        async for batch in call:
            if batch.load.load_only:
                continue
            before = sequences.get(batch.dp_rank)
            if before is not None and batch.sequence_number != before + 1:
                raise _GapError(f"batch {batch.sequence_number} follows {before}")
            sequences[batch.dp_rank] = batch.sequence_number
            for event in batch.events:
                _apply(event, blocks)
            blocks.is_followed = True
    finally:
        call.cancel()


def _apply(event: Any, blocks: CachedBlocks) -> None:
    match event.WhichOneof("data"):
        case "stored" if _is_usable(event.stored):
            stored = event.stored
            parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
            blocks.store(parent, [(one.block_hash, ids_to_bytes(one.token_ids)) for one in stored.blocks])
        case "removed" if event.removed.tier in _DEVICE_TIERS:
            blocks.remove(event.removed.block_hashes)
        case "cleared":
            blocks.clear()


def _is_usable(stored: Any) -> bool:
    """Whether requests without an adapter and a salt find the blocks on the device, in the group of full attention."""
    return (
        stored.tier in _DEVICE_TIERS
        and stored.locality != _REMOTE
        and not stored.lora_name
        and not stored.cache_salt
        and not stored.kv_cache_spec_sliding_window
        and not any(block.HasField("lora_id") or block.cache_level or block.extra_keys for block in stored.blocks)
    )
