"""Random ragged batches, caches that hold them, and tolerances, for the tests of kernels.

Caches are filled by the operations themselves, so that tests do not depend on a layout.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from kernels.interface import KernelOps, KVCache
from kernels.metadata import AttentionMetadata, StepInputs

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-6, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1.6e-2),
    # half of the last of 3 bits of mantissa; where exponents end, half of the smallest value
    torch.float8_e4m3fn: (2**-10, 2**-4),
    torch.float8_e4m3fnuz: (2**-11, 2**-4),
}
"""Absolute and relative error by dtype, for inputs and outputs of unit scale; of 8 bits, in units of the scale."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Returns fp32 numbers of a normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def score_error(head_dim: int, max_score: float, soft_cap: float | None = None) -> float:
    """Returns the absolute error of attention over unit-scale values due to fp32 scores above unit scale.

    A score is a sum of head_dim products. Rounding a partial sum is off by at most u = 2^-24 of it, and partial sums
    stay below the score itself, as their terms have random signs: head_dim roundings of random signs make an error of
    sqrt(head_dim) * u * |score|. With a soft cap, 1 - exp(-2 |score| / cap) and its exponential are each off by u, so
    that the capped score is off by 2 * u * cap. The order of the sum, and so its error, depends on the BLAS library.

    An error d of the scores changes each weight by a factor exp(d), so their average of values of unit scale by d.

    Args:
        head_dim: terms of each sum.
        max_score: the largest absolute score, times the softmax scale.
        soft_cap: of the scores.
    """
    unit = torch.finfo(torch.float32).eps / 2
    return unit * (math.sqrt(head_dim) * max_score + 2 * (soft_cap or 0.0))


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, *, extra_atol: float = 0.0
) -> None:
    """Compares within the tolerance of a dtype, by default that of `actual`; NaN equals nothing.

    Args:
        actual, expected: of the same shape.
        dtype: row of TOLERANCES.
        extra_atol: additional absolute error, derived by the caller.
    Raises: AssertionError: the message names the largest error and its place.
    """
    atol, rtol = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=atol + extra_atol, rtol=rtol)


def assert_quantized(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares vectors [..., n] that were rounded to 8 bits, each with its own scale, with their exact values.

    Raises: AssertionError: the message names the largest error, in units of the scales, and its place.
    """
    scales = exact.abs().amax(dim=-1, keepdim=True) / torch.finfo(dtype).max
    scales = torch.where(scales > 0, scales, 1.0)
    assert_close(actual / scales, exact / scales, dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares fp32 values by their bits: NaN equals itself, -0 is not 0.

    Raises: AssertionError: the message names how many differ, and the largest difference.
    """
    assert actual.dtype is expected.dtype is torch.float32, f"{actual.dtype}, {expected.dtype}"
    assert actual.shape == expected.shape, f"{list(actual.shape)}, {list(expected.shape)}"
    differs = actual.contiguous().view(torch.int32) != expected.contiguous().view(torch.int32)
    assert not differs.any(), f"{int(differs.sum())} of {differs.numel()} differ, by {(actual - expected).abs().max()}"


def cache_tensors(kv_cache: KVCache) -> Iterator[torch.Tensor]:
    """Yields the tensors of a cache of any family: a tuple, or a dataclass."""
    if isinstance(kv_cache, tuple):
        yield from kv_cache
    else:
        for field in fields(kv_cache):
            yield getattr(kv_cache, field.name)


def poison_cache(kv_cache: KVCache) -> None:
    """Fills every slot with NaN, or with integers whose scales are NaN, so that reading one is noticed."""
    for tensor in cache_tensors(kv_cache):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0x55)


def poison_front(kv_cache: KVCache, batch: "RaggedBatch", sliding_window: int | None) -> None:
    """Poisons the blocks in front of the window of every token of a row: other requests may have them."""
    query_lens = batch.metadata.query_start_loc.diff().tolist()
    for row, (query_len, k) in enumerate(zip(query_lens, batch.k, strict=True)):
        first_key = 0 if sliding_window is None else max(0, len(k) - query_len + 1 - sliding_window)
        block_ids = batch.metadata.block_table[row, : first_key // batch.metadata.block_size].long()
        for tensor in cache_tensors(kv_cache):
            if len(tensor):
                tensor[block_ids.to(tensor.device)] = torch.nan if tensor.is_floating_point() else 0x55


def read_cache(kv_cache: KVCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values at slots [n], each [n, num_kv_heads, head_dim] fp32, of a cache of any family."""
    if not isinstance(kv_cache, tuple):
        k, v = kv_cache.read_slots(slots)
        return k, v
    k, v = (part.flatten(0, 1)[slots].float() for part in kv_cache)
    return k, v


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Inputs of one attention call; `fill_cache` makes their cache.

    Attributes:
        q: [T, num_heads, head_dim].
        k, v: per row, its keys and values in order, [seq_len, num_kv_heads, head_dim].
        metadata: the batch; unused entries of the block table point outside of the caches.
        num_blocks: blocks of a cache; more than needed.
        scale: head_dim ** -0.5.
    """

    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    metadata: AttentionMetadata
    num_blocks: int
    scale: float

    def slots(self, row: int) -> torch.Tensor:
        """Returns the slots of a row's keys and values, [seq_len] int64."""
        block_size = self.metadata.block_size
        positions = torch.arange(len(self.k[row]))
        return self.metadata.block_table[row, positions // block_size].long() * block_size + positions % block_size

    def row(self, row: int, start: int = 0, stop: int | None = None) -> "RaggedBatch":
        """Returns a batch of query tokens start:stop of one row, with the keys up to them."""
        first, end = self.metadata.query_start_loc[row : row + 2].tolist()
        stop = end - first if stop is None else stop
        seq_len = len(self.k[row]) - (end - first) + stop
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_table=self.metadata.block_table[row : row + 1],
            slot_mapping=self.metadata.slot_mapping[first + start : first + stop],
            block_size=self.metadata.block_size,
            max_query_len=stop - start,
            max_seq_len=seq_len,
        )
        q = self.q[first + start : first + stop]
        return RaggedBatch(q, (self.k[row][:seq_len],), (self.v[row][:seq_len],), metadata, self.num_blocks, self.scale)


def fill_cache(ops: KernelOps, batch: RaggedBatch, dtype: torch.dtype = torch.float32) -> KVCache:
    """Returns a cache of these operations with a batch's keys and values; unused slots are poisoned."""
    num_kv_heads, head_dim = batch.k[0].shape[1:]
    cache = ops.make_kv_cache(batch.num_blocks, batch.metadata.block_size, num_kv_heads, head_dim, dtype)
    poison_cache(cache)
    device = next(cache_tensors(cache)).device
    k, v = torch.cat(batch.k).to(device), torch.cat(batch.v).to(device)
    slots = torch.cat([batch.slots(row) for row in range(len(batch.k))]).to(device)
    ones = torch.ones(1, head_dim // 2, device=device)  # of position 0, where the rotation changes nothing
    qkv = torch.cat((k.new_zeros(len(k), 1, head_dim), k, v), dim=1).flatten(1)
    ops.rotate_and_store(qkv, torch.zeros_like(slots), ones, torch.zeros_like(ones), cache, slots)
    return cache


def make_metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int, *, generator: torch.Generator
) -> tuple[AttentionMetadata, int]:
    """Makes metadata of a batch whose rows own random blocks.

    Args:
        query_lens: tokens of each row in this step, >= 1.
        seq_lens: tokens of each row including these.
        block_size: tokens per block.
        generator: shuffles.
    Returns: the metadata and the number of blocks the caches must have, some of them unused.
    """
    blocks_per_row = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_per_row) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    block_table = torch.full((len(seq_lens), max(blocks_per_row) + 1), 1 << 30, dtype=torch.int32)
    slots = []
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(blocks_per_row[row])]
        block_table[row, : len(blocks)] = torch.tensor(blocks)
        slots += [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(seq_len - query_len, seq_len)
        ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=block_size,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return metadata, num_blocks


def make_ragged_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> RaggedBatch:
    """Makes random inputs of unit scale in fp32; callers move them to another dtype or device.

    Args:
        query_lens: tokens of each row in this step, >= 1.
        seq_lens: tokens of each row including these.
        num_heads, num_kv_heads, head_dim, block_size: shapes.
        seed: of every random choice.
    """
    generator = torch.Generator().manual_seed(seed)
    metadata, num_blocks = make_metadata(query_lens, seq_lens, block_size, generator=generator)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    k = tuple(random(seq_len, num_kv_heads, head_dim) for seq_len in seq_lens)
    v = tuple(random(seq_len, num_kv_heads, head_dim) for seq_len in seq_lens)
    return RaggedBatch(
        q=random(sum(query_lens), num_heads, head_dim),
        k=k,
        v=v,
        metadata=metadata,
        num_blocks=num_blocks,
        scale=head_dim**-0.5,
    )


def make_step_buffers(
    max_reqs: int, max_tokens: int, max_blocks: int, *, block_size: int = 16, device: torch.device | str = "cpu"
) -> StepInputs:
    """Makes the persistent buffers of a step as they are before the first batch: filled with rows of padding."""
    return StepInputs(
        input_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
        metadata=AttentionMetadata(
            query_start_loc=torch.arange(max_reqs + 1, dtype=torch.int32, device=device),
            seq_lens=torch.zeros(max_reqs, dtype=torch.int32, device=device),
            block_table=torch.zeros(max_reqs, max_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((max_tokens,), -1, device=device),
            block_size=block_size,
            max_query_len=max_tokens,
            max_seq_len=max_blocks * block_size,
        ),
        logits_indices=torch.zeros(max_reqs, dtype=torch.int64, device=device),
    )
