"""Decode attention alone: caches of some layers filled with random keys and values, and one compiled call over them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.bench.shapes import Shape
from kernels.families import cpu_ops
from kernels.interface import KernelOps, KVCache, Step
from kernels.metadata import AttentionMetadata, StepInputs

_BLOCK_SIZE = 16
_FILL_TOKENS = 2048  # tokens written at once, to limit the memory beside the cache


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One query per sequence against all its keys, layer after layer.

    Attributes:
        kv_bytes: bytes of keys and values that a call reads, without scales.
        q: [num_seqs, num_heads, head_dim].
        k, v: per sequence [seq_len, num_kv_heads, head_dim], before the cache quantised them.
    """

    kv_bytes: int
    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    _step: Step
    _inputs: StepInputs

    def run(self) -> torch.Tensor:
        """Returns [num_seqs, num_heads * head_dim] of the last layer; valid until the next call."""
        return self._step(self._inputs)

    def expected(self, index: int) -> torch.Tensor:
        """Returns the exact row of a sequence, [num_heads * head_dim], from the unquantised keys and values."""
        group_size = self.q.shape[1] // self.k[index].shape[1]
        keys, values = (x[index].transpose(0, 1).repeat_interleave(group_size, dim=0) for x in (self.k, self.v))
        query = self.q[index].unsqueeze(1)  # [num_heads, 1, head_dim]
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values).flatten()


def make_attention_call(
    shape: Shape, seq_lens: Sequence[int], dtype: torch.dtype, *, num_layers: int, num_threads: int
) -> AttentionCall:
    """Fills caches and compiles the call.

    Args:
        shape: heads and their size.
        seq_lens: tokens of each sequence.
        dtype: of the cache, float32 or int8.
        num_layers: caches with the same content; together they should exceed the CPU's caches.
        num_threads: compute threads.
    """
    ops = cpu_ops(num_threads=num_threads)
    generator = torch.Generator().manual_seed(0)
    every_token, num_blocks = _every_token(seq_lens, generator)
    num_heads, num_kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    k, v = (torch.randn(sum(seq_lens), num_kv_heads, head_dim, generator=generator) for _ in range(2))
    caches = [ops.make_kv_cache(num_blocks, _BLOCK_SIZE, num_kv_heads, head_dim, dtype) for _ in range(num_layers)]
    for cache in caches:
        _fill(ops, cache, k, v, every_token.slot_mapping, num_heads)
    q = torch.randn(len(seq_lens), num_heads, head_dim, generator=generator)
    inputs = _decode_inputs(every_token, seq_lens)

    def attend(inputs: StepInputs) -> torch.Tensor:
        for cache in caches:
            out = ops.paged_attention(q, cache, inputs.metadata, scale=head_dim**-0.5)
        return out

    return AttentionCall(
        kv_bytes=num_layers * 2 * sum(seq_lens) * num_kv_heads * head_dim * dtype.itemsize,
        q=q,
        k=torch.split_with_sizes(k, list(seq_lens)),
        v=torch.split_with_sizes(v, list(seq_lens)),
        _step=ops.compile_step(attend, inputs),
        _inputs=inputs,
    )


def _fill(
    ops: KernelOps, cache: KVCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, num_heads: int
) -> None:
    """Writes keys and values [T, num_kv_heads, head_dim] to their slots, without rotation."""
    head_dim = k.shape[2]
    cos, sin = torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)
    for start in range(0, len(k), _FILL_TOKENS):
        tokens = slice(start, start + _FILL_TOKENS)
        num_tokens = len(k[tokens])
        queries = torch.zeros(num_tokens, num_heads * head_dim)
        qkv = torch.cat([queries, k[tokens].flatten(1), v[tokens].flatten(1)], dim=1)
        positions = torch.zeros(num_tokens, dtype=torch.int64)
        ops.rotate_and_store(qkv, positions, cos, sin, cache, slot_mapping[tokens].contiguous())


def _every_token(seq_lens: Sequence[int], generator: torch.Generator) -> tuple[AttentionMetadata, int]:
    """Returns metadata of a step that computes all tokens of all sequences over shuffled blocks, and their number."""
    blocks_per_seq = [-(-seq_len // _BLOCK_SIZE) for seq_len in seq_lens]
    num_blocks = sum(blocks_per_seq)
    blocks = torch.split_with_sizes(torch.randperm(num_blocks, generator=generator), blocks_per_seq)
    slots = [
        (own.unsqueeze(1) * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE)).flatten()[:seq_len]
        for own, seq_len in zip(blocks, seq_lens, strict=True)
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *seq_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).to(torch.int32),
        slot_mapping=torch.cat(slots),
        block_size=_BLOCK_SIZE,
        max_query_len=max(seq_lens),
        max_seq_len=max(seq_lens),
    )
    return metadata, num_blocks


def _decode_inputs(every_token: AttentionMetadata, seq_lens: Sequence[int]) -> StepInputs:
    """Returns the inputs of the step that computes the last token of every sequence."""
    num_seqs = len(seq_lens)
    last_tokens = torch.tensor(seq_lens).cumsum(0) - 1
    metadata = replace(
        every_token,
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
        slot_mapping=every_token.slot_mapping[last_tokens],
        max_query_len=1,
    )
    return StepInputs(
        input_ids=torch.zeros(num_seqs, dtype=torch.int64),
        positions=torch.tensor(seq_lens) - 1,
        metadata=metadata,
        logits_indices=torch.arange(num_seqs),
    )
