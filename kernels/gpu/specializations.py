"""Calls that together compile every specialization of every kernel; the compile check makes them for each target.

A family of kernels lists its calls here, on tensors without memory (`meta`), to be made inside `launch.compile_only`.
It also lists calls of random sizes, as in live traffic, none of which may need a further compile.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.dtypes import dtype_name
from kernels.gpu.adapter_specializations import adapter_calls, live_adapter_calls
from kernels.gpu.block_scales import BlockScaledLinear
from kernels.gpu.delta_specializations import delta_calls, live_delta_calls
from kernels.gpu.expert_specializations import expert_calls, live_expert_calls
from kernels.gpu.grouped_linear import grouped_span, pack_grouped
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.linear import PackedLinear
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.row_specializations import Call, live_row_calls, model_dtypes, row_calls
from kernels.gpu.sample import sample
from kernels.gpu.targets import Target
from kernels.gpu.tiled_linear import tiled_linear
from kernels.gpu.tiles import has_latent_kernels, scaled_product_tiles
from kernels.grouped_weights import GroupedWeights
from kernels.metadata import AttentionMetadata
from kernels.sampling import TokenMasks, greedy_batch
from kernels.scale_groups import FP8_BLOCK_SIZE

_META = torch.device("meta")
_NUM_KV_HEADS = 8
_NUM_PROCESSORS = 132
_MAX_LIVE_TOKENS = 8192  # of a step: AMD's compiler distinguishes tensors beyond 2 GiB
_LAYERS = ((4096, 6144), (14336, 4096), (576, 49152), (4096, 28672), (896, 1152), (1037, 999))


class Family(NamedTuple):
    """Kernels that are checked together.

    Attributes:
        specializations: (target, everything) -> the calls to compile; without `everything`, a subset that covers
            each tile of the target and each branch of the kernels once.
        live: (target, generator) -> calls of random sizes, with shapes of the subset.
    """

    specializations: Callable[[Target, bool], Iterator[Call]]
    live: Callable[[Target, random.Random], Iterator[Call]]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of attention that the model and the flags determine."""

    head_dim: int = 128
    value_dim: int | None = None  # None: that of a key; else latents
    group_size: int = 4
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def label(self) -> str:
        """Description for reports."""
        size = "head size" if self.value_dim is None else f"latents of {self.value_dim} in"
        return (
            f"{size} {self.head_dim}, group {self.group_size}, blocks of {self.block_size}, "
            f"{dtype_name(self.dtype)}, cache {dtype_name(self.kv_dtype)}"
            f"{', window' if self.sliding_window else ''}{', soft cap' if self.soft_cap else ''}"
            f"{', sinks' if self.has_sinks else ''}"
        )


def attention_shapes(target: Target, everything: bool) -> Iterator[AttentionShape]:
    """Returns shapes whose kernels differ; float16 takes the place of bfloat16 where the target lacks it.

    Tiles, and nearly all possible failures, follow from head size and dtypes: each pair of them is combined with every
    block size and every feature. Groups and fp16 change little else and are varied alone.
    """
    bf16 = target.half_dtype
    fp16, fp32 = torch.float16, torch.float32
    shape = AttentionShape(dtype=bf16, kv_dtype=bf16)
    if not everything:
        yield shape
        yield replace(shape, head_dim=256, block_size=64)
        yield replace(shape, head_dim=512, group_size=8)
        yield from _latent_shapes(shape, target)
        yield replace(shape, head_dim=64, group_size=8, sliding_window=128, has_sinks=True)
        yield replace(shape, head_dim=80, group_size=7, dtype=fp16, kv_dtype=fp16, sliding_window=1024, soft_cap=50.0)
        if target.fp8_dtype is not None:
            yield replace(shape, kv_dtype=target.fp8_dtype, block_size=128)
            yield replace(
                shape, head_dim=64, group_size=8, kv_dtype=target.fp8_dtype, sliding_window=128, has_sinks=True
            )
            yield replace(shape, head_dim=256, kv_dtype=target.fp8_dtype, sliding_window=1024)
            yield from _latent_shapes(replace(shape, kv_dtype=target.fp8_dtype), target)
        return
    for kv_dtype in (bf16, target.fp8_dtype):
        if kv_dtype is None:
            continue
        yield from _latent_shapes(replace(shape, kv_dtype=kv_dtype), target)
        for head_dim in (64, 80, 96, 128, 192, 256, 512):
            sized = replace(shape, head_dim=head_dim, kv_dtype=kv_dtype)
            yield from (replace(sized, block_size=block_size) for block_size in (16, 32, 64, 128))
            yield replace(sized, sliding_window=1024)
            yield replace(sized, soft_cap=50.0)
            yield replace(sized, sliding_window=1024, has_sinks=True)
            yield replace(sized, sliding_window=1024, soft_cap=50.0)
            yield replace(sized, dtype=fp16, kv_dtype=fp16 if kv_dtype is bf16 else kv_dtype)
        yield from (
            replace(shape, kv_dtype=kv_dtype, group_size=group_size) for group_size in (1, 2, 3, 5, 6, 7, 8, 16)
        )
    yield from (replace(shape, head_dim=head_dim, dtype=fp32, kv_dtype=fp32) for head_dim in (64, 128, 256, 512))
    yield replace(shape, head_dim=256, dtype=fp32, kv_dtype=fp32, sliding_window=1024, soft_cap=50.0)
    yield from _latent_shapes(replace(shape, dtype=fp32, kv_dtype=fp32), target)


def _latent_shapes(shape: AttentionShape, target: Target) -> Iterator[AttentionShape]:
    """Returns shapes of latent attention: those of DeepSeek-V3 and of MiniCPM3."""
    if has_latent_kernels(target):
        yield replace(shape, head_dim=576, value_dim=512, group_size=128)
        yield replace(shape, head_dim=288, value_dim=256, group_size=40)


def _attention_call(
    shape: AttentionShape,
    target: Target,
    *,
    num_decodes: int,
    num_prefill_tokens: int,
    num_rows: int,
    max_seq_len: int = 8192,
    max_blocks: int = 512,
    batch_invariant: bool = False,
) -> Call:
    num_tokens = num_decodes + num_prefill_tokens
    num_kv_heads = _NUM_KV_HEADS if shape.value_dim is None else 1
    cache_shape = (1024, num_kv_heads, shape.block_size)
    heads = num_kv_heads * shape.group_size
    scales = torch.empty(cache_shape if shape.kv_dtype.itemsize == 1 else (0,), device=_META)

    def make() -> object:
        qkv = torch.empty((num_tokens, heads + 2 * num_kv_heads, shape.head_dim), dtype=shape.dtype, device=_META)
        cache = torch.empty((*cache_shape, shape.head_dim), dtype=shape.kv_dtype, device=_META)
        metadata = AttentionMetadata(
            query_start_loc=torch.empty(num_rows + 1, dtype=torch.int32, device=_META),
            seq_lens=torch.empty(num_rows, dtype=torch.int32, device=_META),
            block_table=torch.empty((num_rows, max_blocks), dtype=torch.int32, device=_META),
            slot_mapping=torch.empty(num_tokens, dtype=torch.int64, device=_META),
            block_size=shape.block_size,
            max_query_len=max(1, num_prefill_tokens),
            max_seq_len=max_seq_len,
            num_one_token_reqs=num_decodes,
        )
        return paged_attention(
            qkv[:, :heads],
            GpuKVCache(cache, cache[..., : shape.value_dim], scales, scales),
            metadata,
            scale=shape.head_dim**-0.5,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            sinks=torch.empty(heads, dtype=shape.dtype, device=_META) if shape.has_sinks else None,
            target=target,
            num_processors=_NUM_PROCESSORS,
            batch_invariant=batch_invariant,
        )

    return Call(f"{shape.label()}{', batch-invariant' if batch_invariant else ''}", make)


def _attention_specializations(target: Target, everything: bool) -> Iterator[Call]:
    for shape in attention_shapes(target, everything):
        yield _attention_call(shape, target, num_decodes=1, num_prefill_tokens=2, num_rows=2)


def _invariant_specializations(target: Target, everything: bool) -> Iterator[Call]:
    shapes = list(attention_shapes(target, everything))
    if not everything:  # the most common sizes, by dtype of the cache
        shapes = [replace(shape, block_size=16) for shape in shapes if shape.head_dim == 128]
    for shape in shapes:
        yield _attention_call(shape, target, num_decodes=1, num_prefill_tokens=2, num_rows=2, batch_invariant=True)
    for dtype in model_dtypes(target, everything):
        for num_in, num_out in _LAYERS if everything else _LAYERS[:2]:
            yield _product_call(num_in, num_out, dtype, target, 3)


def _channel_scaled_specializations(target: Target, everything: bool) -> Iterator[Call]:
    for num_in, num_out in _LAYERS if everything else _LAYERS[:2]:
        yield from _channel_scaled_calls(num_in, num_out, target, 3)


def _live_channel_scaled(target: Target, generator: random.Random) -> Iterator[Call]:
    for num_rows in (1, 16, 17, 64, 65, 128, generator.randint(1, 128)):
        yield from _channel_scaled_calls(*_LAYERS[0], target, num_rows)


def _channel_scaled_calls(num_in: int, num_out: int, target: Target, num_rows: int) -> Iterator[Call]:
    def make() -> object:
        weight = torch.empty(num_out, num_in, dtype=target.fp8_dtype, device=_META).t()
        scales, x = torch.empty(1, num_out, device=_META), torch.empty(num_rows, num_in, dtype=dtype, device=_META)
        return [
            tiled_linear(
                x,
                PackedLinear(weight, scales, bias, dtype),
                target=target,
                num_processors=_NUM_PROCESSORS,
                batch_invariant=batch_invariant,
            )
            for bias in (torch.empty(num_out, dtype=dtype, device=_META), None)
            for batch_invariant in (False, True)
        ]

    dtype = torch.bfloat16
    if scaled_product_tiles(target):
        yield Call(f"{dtype_name(dtype)}, scales per channel, {num_in} inputs, {num_out} outputs", make)


def _block_scaled_specializations(target: Target, everything: bool) -> Iterator[Call]:
    for dtype in model_dtypes(target, everything):
        for num_in, num_out in [layer for layer in _LAYERS if everything or layer[0] == 4096]:
            if num_in % FP8_BLOCK_SIZE == 0 and num_out % FP8_BLOCK_SIZE == 0:
                yield _block_scaled_call(num_in, num_out, dtype, target, 3)


def _live_block_scaled(target: Target, generator: random.Random) -> Iterator[Call]:
    for num_rows in (1, 16, 17, 64, 65, 128, 129, 3000, *(generator.randint(1, 20000) for _ in range(8))):
        yield _block_scaled_call(*_LAYERS[0], target.half_dtype, target, num_rows)


def _block_scaled_call(num_in: int, num_out: int, dtype: torch.dtype, target: Target, num_rows: int) -> Call:
    def make() -> object:
        weight = torch.empty(num_out, num_in, dtype=target.fp8_dtype or torch.uint8, device=_META)
        scales = torch.empty(num_out // FP8_BLOCK_SIZE, num_in // FP8_BLOCK_SIZE, device=_META)
        bias = torch.empty(num_out, dtype=dtype, device=_META)
        x = torch.empty(num_rows, num_in, dtype=dtype, device=_META)
        return [
            tiled_linear(
                x,
                BlockScaledLinear(weight, scales, bias_or_none, dtype),
                target=target,
                num_processors=_NUM_PROCESSORS,
                batch_invariant=batch_invariant,
            )
            for bias_or_none in (bias, None)
            for batch_invariant in (False, True)
        ]

    return Call(f"{dtype_name(dtype)}, scales per block, {num_in} inputs, {num_out} outputs", make)


def _grouped_specializations(target: Target, everything: bool) -> Iterator[Call]:
    forms = ((4, 128), (4, 32), (8, 128)) if not everything else itertools.product((4, 8), (128, 64, 32, 16, None))
    for (num_bits, group_size), dtype in itertools.product(forms, model_dtypes(target, everything)):
        for num_in, num_out in [layer for layer in _LAYERS if everything or layer[0] == 4096]:
            if grouped_span(num_in, group_size or num_in, num_bits) is not None:
                yield _grouped_call(num_in, num_out, num_bits, group_size or num_in, dtype, target, 3)


def _live_grouped(target: Target, generator: random.Random) -> Iterator[Call]:
    for num_rows in (1, 16, 17, 64, 65, 128, 129, 3000, *(generator.randint(1, 20000) for _ in range(8))):
        yield _grouped_call(*_LAYERS[0], 4, 128, target.half_dtype, target, num_rows)


def _grouped_call(
    num_in: int, num_out: int, num_bits: int, group_size: int, dtype: torch.dtype, target: Target, num_rows: int
) -> Call:
    def make() -> object:
        values = torch.empty(num_out, num_in, dtype=torch.uint8, device=_META)
        scales, offsets = (torch.empty(num_out, num_in // group_size, device=_META) for _ in range(2))
        span = grouped_span(num_in, group_size, num_bits)
        assert span is not None, "no such groups are listed"
        x = torch.empty(num_rows, num_in, dtype=dtype, device=_META)
        return [
            tiled_linear(
                x,
                pack_grouped(GroupedWeights(values, scales, offsets, num_bits), bias, dtype, span),
                target=target,
                num_processors=_NUM_PROCESSORS,
                batch_invariant=batch_invariant,
            )
            for bias in (torch.empty(num_out, dtype=dtype, device=_META), None)
            for batch_invariant in (False, True)
        ]

    form = f"{num_bits} bits in groups of {group_size}"
    return Call(f"{dtype_name(dtype)}, {form}, {num_in} inputs, {num_out} outputs", make)


def _live_invariant(target: Target, generator: random.Random) -> Iterator[Call]:
    for num_rows in (1, 16, 128, 129, 3000, *(generator.randint(1, 20000) for _ in range(8))):
        for num_in, num_out in _LAYERS[:2]:
            yield _product_call(num_in, num_out, target.half_dtype, target, num_rows)


def _product_call(num_in: int, num_out: int, dtype: torch.dtype, target: Target, num_rows: int) -> Call:
    def make() -> object:
        layer = PackedLinear(
            torch.empty(num_out, num_in, dtype=dtype, device=_META),
            None,
            torch.empty(num_out, dtype=dtype, device=_META),
            dtype,
        )
        x = torch.empty(num_rows, num_in, dtype=dtype, device=_META)
        return [
            tiled_linear(x, packed, target=target, num_processors=_NUM_PROCESSORS, batch_invariant=True)
            for packed in (layer, replace(layer, bias=None))
        ]

    return Call(f"{dtype_name(dtype)}, {num_in} inputs, {num_out} outputs", make)


def _live_attention(target: Target, generator: random.Random) -> Iterator[Call]:
    sizes = (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 256)
    for shape in attention_shapes(target, False):
        for _ in range(30):
            num_decodes = generator.choice((0, *sizes))
            num_prefills = generator.choice((0, *sizes)) if num_decodes else generator.choice(sizes)
            num_tokens = num_prefills * generator.choice(sizes) + (num_prefills > 0)
            yield _attention_call(
                shape,
                target,
                num_decodes=num_decodes,
                num_prefill_tokens=min(num_tokens, _MAX_LIVE_TOKENS),
                num_rows=num_decodes + num_prefills,
                max_seq_len=generator.choice((*sizes, 1000, 4096, 100_000)),
                max_blocks=generator.choice(sizes),
            )


def _sampling_call(
    target: Target,
    vocab_size: int,
    num_rows: int,
    *,
    max_len: int = 4096,
    num_biases: int = 0,
    max_top_logprobs: int = -1,
    num_masks: int | None = None,
    is_forced: bool = False,
    hints: tuple[bool, bool, bool] = (True, True, True),
) -> Call:
    def column(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape or (num_rows,), dtype=dtype, device=_META)

    def make() -> object:
        masks = column(torch.int32, 1024, -(-vocab_size // 32))
        batch = greedy_batch(
            num_rows,
            _META,
            max_top_logprobs=max_top_logprobs,
            history=column(torch.int32, 256, max_len),
            bias_ids=column(torch.int32, num_biases),
            bias_values=column(torch.float32, num_biases),
            any_penalised=hints[0],
            any_random=hints[1],
            any_filtered=hints[2],
            masks=None if num_masks is None else TokenMasks(column(torch.int32), masks[:num_masks]),
            forced_ids=column(torch.int32) if is_forced else None,
        )
        logits = column(torch.float32, num_rows, vocab_size)
        return sample(logits, batch, target=target, num_processors=_NUM_PROCESSORS)

    return Call(f"vocabulary of {vocab_size}", make)


def _sampling_specializations(target: Target, everything: bool) -> Iterator[Call]:
    """Varies the vocabulary size, which decides the tiles and whether rows start at multiples of 16 bytes."""
    for vocab_size in (128_256, 32_000, 50_257, 151_936, 262_208) if everything else (128_256,):
        yield _sampling_call(target, vocab_size, 2)


def _live_sampling(target: Target, generator: random.Random) -> Iterator[Call]:
    sizes = (1, 2, 3, 16, 17, 64, 100, 256, 1024)
    for _ in range(30):
        yield _sampling_call(
            target,
            128_256,
            generator.choice(sizes),
            max_len=generator.choice(sizes),
            num_biases=generator.choice((0, *sizes)),
            max_top_logprobs=generator.choice((-1, 0, 1, 5, 16, 20, 1024)),
            num_masks=generator.choice((None, *sizes)),
            is_forced=generator.random() < 0.5,
            hints=(generator.random() < 0.5, generator.random() < 0.5, generator.random() < 0.5),
        )


FAMILIES = {
    "paged_attention": Family(_attention_specializations, _live_attention),
    "batch_invariant": Family(_invariant_specializations, _live_invariant),
    "channel_scaled": Family(_channel_scaled_specializations, _live_channel_scaled),
    "block_scaled": Family(_block_scaled_specializations, _live_block_scaled),
    "grouped": Family(_grouped_specializations, _live_grouped),
    "experts": Family(expert_calls, live_expert_calls),
    "adapters": Family(adapter_calls, live_adapter_calls),
    "delta_rule": Family(delta_calls, live_delta_calls),
    "rows": Family(row_calls, live_row_calls),
    "sample": Family(_sampling_specializations, _live_sampling),
}
"""Families by their name in the compile check."""
