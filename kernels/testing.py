"""What tests of kernels share: random ragged batches, and how far results may be from the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.metadata import AttentionMetadata

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-6, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1e-2, 1.6e-2),
}
"""Absolute and relative error by dtype, for inputs and outputs of unit scale."""


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares within the tolerance of the dtype of `actual`; NaN equals nothing.

    Raises: AssertionError: says how far and where.
    """
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), atol=atol, rtol=rtol)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Inputs of one attention call. Every slot that no token of a row owns is NaN, so that reading one shows.

    Attributes:
        q: [T, num_heads, head_dim].
        k, v: per row, its keys and values in order, [seq_len, num_kv_heads, head_dim]: what the caches hold in blocks.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; more blocks than needed, in shuffled order.
        metadata: the batch; unused entries of the block table point outside of the caches.
        scale: head_dim ** -0.5.
    """

    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata
    scale: float


def make_metadata(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int, *, generator: torch.Generator
) -> tuple[AttentionMetadata, int]:
    """Deals shuffled blocks out to rows.

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
    """Random inputs of unit scale in fp32; move them to another dtype or device as needed.

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
    k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), torch.nan)
    v_cache = torch.full_like(k_cache, torch.nan)
    for row, seq_len in enumerate(seq_lens):
        for position in range(seq_len):
            block = int(metadata.block_table[row, position // block_size])
            k_cache[block, position % block_size] = k[row][position]
            v_cache[block, position % block_size] = v[row][position]
    return RaggedBatch(
        q=random(sum(query_lens), num_heads, head_dim),
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        metadata=metadata,
        scale=head_dim**-0.5,
    )
