"""Attention over a paged cache: decodes against the copy ceiling, prompts against the matrix ceiling, and mixed.

Blocks are assigned in random order. The calls of a case share one cache but read different blocks. The work list of
decode rows, which all layers of a step share, is not timed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.bench.case import Case, Prepared, num_copies, relative_error
from kernels.bench.device import BenchDevice
from kernels.bench.dims import Dims
from kernels.bench.expected import DECODE_ATTENTION, PREFILL_ATTENTION, Expected
from kernels.dtypes import dtype_name
from kernels.gpu.kv_cache import GpuKVCache, make_kv_cache
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.tiles import has_latent_kernels
from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import paged_attention as reference_attention

_BLOCK_SIZE = 16
_FILL_BLOCKS = 1 << 14  # filled at once, to limit the memory beside the cache
_CHECKED_TOKENS = 64  # compared query tokens at each end of a row
_MAX_ERROR = 1e-2  # for bf16 and fp16 inputs
_MAX_FLOAT8_ERROR = 4e-2  # probabilities are rounded to 3 bits of mantissa too
_DECODE_GOAL, _DECODE_GOAL_TOKENS = 0.88, 128 << 10
_PREFILL_GOAL_TFLOPS, _PREFILL_GOAL_TOKENS = 420.0, 8192


_LATENTS = Dims(128, 1, 576, 7168, 18432, 129_280, value_dim=512)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one attention call.

    Attributes:
        query_lens: query tokens of each row; rows of one token come first.
        seq_lens: tokens of each row, including its query tokens.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_one_token(self) -> int:
        """Number of rows of one query token."""
        return sum(query_len == 1 for query_len in self.query_lens)

    @property
    def num_pairs(self) -> int:
        """Number of visible pairs of query and key tokens in rows of several query tokens; the diagonal counts half."""
        pairs = [q * (n - q) + q * q // 2 for q, n in zip(self.query_lens, self.seq_lens, strict=True) if q > 1]
        return sum(pairs)

    @property
    def num_decode_keys(self) -> int:
        """Number of key tokens in rows of one query token."""
        return sum(n for q, n in zip(self.query_lens, self.seq_lens, strict=True) if q == 1)


def decode_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields decode batches, with the cache in bf16 and in 8 bits: every batch size and context, and uneven lengths
    beside as many keys in rows of equal lengths.
    """
    batches, contexts = ((1, 3), (40,)) if quick else ((1, 8, 32, 64, 128, 256), (512, 2048, 8192))
    uneven = ((20, 20, 300),) if quick else ((*(512,) * 33, 32_768), (*(512,) * 255, 131_072))
    for kv_dtype in _kv_dtypes(device):
        prefix = f"decode attention, {_short(kv_dtype)} cache"
        for context in contexts:
            for batch in batches:
                has_goal = batch * context >= _DECODE_GOAL_TOKENS
                yield _case(
                    device,
                    dims,
                    Batch((1,) * batch, (context,) * batch),
                    kv_dtype,
                    f"{prefix}, batch {batch}, context {context:,}",
                    goal_id="G10" if has_goal else "",
                    goal_fraction=_DECODE_GOAL if has_goal else None,
                    expected=DECODE_ATTENTION.get(8 * kv_dtype.itemsize) if has_goal else None,
                )
        for lengths in uneven:
            num_rows = len(lengths)
            mean = round(sum(lengths) / num_rows)
            equal = f"{prefix}, batch {num_rows}, context {mean:,}"
            what = f"{prefix}, {num_rows - 1} of {lengths[0]} and one of {lengths[-1]:,}"
            yield _case(device, dims, Batch((1,) * num_rows, (mean,) * num_rows), kv_dtype, equal)
            yield _case(device, dims, Batch((1,) * num_rows, lengths), kv_dtype, what, equal=equal)


def prefill_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields whole prompts that fill a step of 8,192 tokens, short chunks behind a cached prefix, and several chunks
    behind uneven prefixes beside as many keys in equal ones.
    """
    for length in (33,) if quick else (512, 1024, 2048, 4096, 8192):
        rows = 1 if quick else max(1, 8192 // length)
        has_goal = length == _PREFILL_GOAL_TOKENS and dims.head_dim == 128
        for kv_dtype in _kv_dtypes(device):
            is_float8 = kv_dtype is not torch.bfloat16
            yield _case(
                device,
                dims,
                Batch((length,) * rows, (length,) * rows),
                kv_dtype,
                f"prefill attention, {_short(kv_dtype)} cache, {rows} x {length:,} tokens",
                goal_id="G11" if has_goal and not is_float8 else "",
                goal_rate=_PREFILL_GOAL_TFLOPS if has_goal and not is_float8 else None,
                expected=PREFILL_ATTENTION if has_goal and not is_float8 else None,
            )
    for num_new, context in ((7, 40),) if quick else ((100, 2048), (100, 32_768), (16, 131_072)):
        for kv_dtype in _kv_dtypes(device):
            yield _case(
                device,
                dims,
                Batch((num_new,), (context + num_new,)),
                kv_dtype,
                f"prefill attention, {_short(kv_dtype)} cache, chunk of {num_new} behind {context:,}",
            )
    num_new, rows, short, longest = (7, 2, 20, 600) if quick else (64, 8, 2048, 98_304)
    mean = ((rows - 1) * short + longest) // rows
    for kv_dtype in _kv_dtypes(device):
        equal = f"prefill attention, {_short(kv_dtype)} cache, {rows} chunks of {num_new} behind {mean:,}"
        what = f"{equal.removesuffix(f'{mean:,}')}{short:,}, one behind {longest:,}"
        for prefixes, name in (((mean,) * rows, equal), ((*(short,) * (rows - 1), longest), what)):
            batch = Batch((num_new,) * rows, tuple(prefix + num_new for prefix in prefixes))
            yield _case(device, dims, batch, kv_dtype, name, equal="" if name is equal else equal)


def mixed_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields decodes with prompt chunks in one call: first chunks, and chunks after 2,048 tokens. Decodes have equal
    lengths, then one has most of the keys.
    """
    num_decodes, mean, short = (2, 24, 17) if quick else (64, 2048, 512)
    chunks = [(20, 20), (9, 40)] if quick else [(512, 512), (512, 2560), (1024, 3072)]
    longest = num_decodes * mean - (num_decodes - 1) * short
    for kv_dtype in _kv_dtypes(device):
        equal = ""
        for lengths in ((mean,) * num_decodes, (*(short,) * (num_decodes - 1), longest)):
            batch = Batch(
                (*(1,) * num_decodes, *(query_len for query_len, _ in chunks)),
                (*lengths, *(seq_len for _, seq_len in chunks)),
            )
            what = (
                f"mixed attention, {num_decodes} decodes{f', one of {longest:,}' if equal else ''} and chunks of "
                f"{', '.join(str(query_len) for query_len, _ in chunks)}, {_short(kv_dtype)} cache"
            )
            yield _case(device, dims, batch, kv_dtype, what, equal=equal)
            equal = what


def latent_cases(device: BenchDevice, _dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields decode batches and prompts with the latents of DeepSeek-V2-Lite and V3, whatever the model is."""
    if not has_latent_kernels(device.target):
        return
    batches, contexts, length = ((3,), (40,), 33) if quick else ((1, 64, 256), (2048, 8192), 8192)
    for num_heads in (20,) if quick else (16, 128):
        dims = _LATENTS._replace(num_heads=num_heads)
        for kv_dtype in _kv_dtypes(device):
            kind = f"latent attention, {num_heads} heads, {_short(kv_dtype)} cache"
            for context in contexts:
                for batch in batches:
                    rows = Batch((1,) * batch, (context,) * batch)
                    yield _case(device, dims, rows, kv_dtype, f"{kind}, batch {batch}, context {context:,}")
            yield _case(device, dims, Batch((length,), (length,)), kv_dtype, f"{kind}, prompt of {length:,}")


def _case(
    device: BenchDevice,
    dims: Dims,
    batch: Batch,
    kv_dtype: torch.dtype,
    what: str,
    *,
    goal_id: str = "",
    goal_fraction: float | None = None,
    goal_rate: float | None = None,
    equal: str = "",
    expected: Expected | None = None,
) -> Case:
    value_dim = dims.value_dim or dims.head_dim
    num_parts = 2 if dims.value_dim is None else 1
    scale_bytes = 4 if kv_dtype.itemsize == 1 else 0
    token_bytes = num_parts * dims.num_kv_heads * (dims.head_dim * kv_dtype.itemsize + scale_bytes)
    num_queries = sum(batch.query_lens)
    is_decode, is_prefill = not batch.num_pairs, not batch.num_decode_keys
    # A prompt's keys are read many times, from caches; products are its bound.
    num_bytes = batch.num_decode_keys * token_bytes
    if is_decode:
        num_bytes += num_queries * dims.num_heads * (dims.head_dim + value_dim) * 2
    return Case(
        what=what,
        prepare=lambda: _prepare(device, dims, batch, kv_dtype),
        num_bytes=num_bytes,
        num_flops=2 * dims.num_heads * (dims.head_dim + value_dim) * batch.num_pairs,
        unit="GB/s" if is_decode else "TFLOP/s" if is_prefill else "us",
        adds_up=True,
        max_error=_MAX_FLOAT8_ERROR if kv_dtype.itemsize == 1 else _MAX_ERROR,
        goal_id=goal_id,
        goal_fraction=goal_fraction,
        goal_rate=goal_rate,
        equal=equal,
        expected=expected,
    )


def _prepare(device: BenchDevice, dims: Dims, batch: Batch, kv_dtype: torch.dtype) -> Prepared:
    blocks_of = [-(-seq_len // _BLOCK_SIZE) for seq_len in batch.seq_lens]
    block_bytes = 2 * _BLOCK_SIZE * dims.num_kv_heads * dims.head_dim * kv_dtype.itemsize
    copies = num_copies(device, sum(blocks_of) * block_bytes)
    num_blocks = copies * sum(blocks_of)
    cache = _filled_cache(device, dims, num_blocks, kv_dtype)
    order = torch.randperm(num_blocks, device=device.device, dtype=torch.int32)
    inputs = []
    for blocks in order.split(sum(blocks_of)):
        q = torch.randn(sum(batch.query_lens), dims.num_heads, dims.head_dim, device=device.device)
        inputs.append((q.to(torch.bfloat16), _metadata(batch, blocks, blocks_of)))
    scale = dims.head_dim**-0.5

    def attend(q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return paged_attention(
            q, cache, metadata, scale=scale, target=device.target, num_processors=device.num_processors
        )

    return Prepared(
        calls=[lambda q=q, metadata=metadata: attend(q, metadata) for q, metadata in inputs],  # type: ignore[misc]
        error=lambda: _error(attend(*inputs[-1]), cache, batch, *inputs[-1], scale),
    )


def _filled_cache(device: BenchDevice, dims: Dims, num_blocks: int, kv_dtype: torch.dtype) -> GpuKVCache:
    """Returns a cache with keys and values of unit scale in every slot."""
    cache = make_kv_cache(
        num_blocks,
        _BLOCK_SIZE,
        dims.num_kv_heads,
        dims.head_dim,
        kv_dtype,
        dims.value_dim,
        device=device.device,
        target=device.target,
    )
    scale = 1.0
    if cache.is_quantized:
        scale = 4.0 / torch.finfo(kv_dtype).max  # four standard deviations
        cache.k_scales.fill_(scale)
        cache.v_scales.fill_(scale)
    for tensor in (cache.k, cache.v):
        for part in tensor.split(_FILL_BLOCKS):
            values = torch.randn(part.shape, device=device.device).clamp_(-4, 4) / scale
            part.copy_(values.to(kv_dtype))
    return cache


def _metadata(batch: Batch, blocks: torch.Tensor, blocks_of: Sequence[int]) -> AttentionMetadata:
    device = blocks.device
    block_table = torch.zeros(len(blocks_of), max(blocks_of), dtype=torch.int32, device=device)
    for row, own in enumerate(blocks.split(list(blocks_of))):
        block_table[row, : len(own)] = own
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *batch.query_lens]).cumsum(0).to(torch.int32).to(device),
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
        block_table=block_table,
        slot_mapping=torch.zeros(sum(batch.query_lens), dtype=torch.int64, device=device),  # attention stores nothing
        block_size=_BLOCK_SIZE,
        max_query_len=max(batch.query_lens),
        max_seq_len=max(batch.seq_lens),
        num_one_token_reqs=batch.num_one_token,
    )


def _error(
    out: torch.Tensor,
    cache: GpuKVCache,
    batch: Batch,
    q: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
) -> float:
    """Returns the largest error at the first and last query tokens of some rows; NaN if any value is NaN."""
    if bool(out.isnan().any()):
        return float("nan")
    rows = sorted({0, len(batch.seq_lens) // 2, max(0, batch.num_one_token - 1), len(batch.seq_lens) - 1})
    starts = metadata.query_start_loc.tolist()
    return max(
        relative_error(
            out[starts[row] + first : starts[row] + last],
            _expected(q[starts[row] + first : starts[row] + last], cache, batch, metadata, row, last, scale),
        )
        for row in rows
        for first, last in _spans(batch.query_lens[row])
    )


def _spans(query_len: int) -> list[tuple[int, int]]:
    return sorted({(0, min(_CHECKED_TOKENS, query_len)), (max(0, query_len - _CHECKED_TOKENS), query_len)})


def _expected(
    q: torch.Tensor,
    cache: GpuKVCache,
    batch: Batch,
    metadata: AttentionMetadata,
    row: int,
    last: int,
    scale: float,
) -> torch.Tensor:
    """Returns the reference for query tokens [n, num_heads, head_dim] that end before token `last` of a row."""
    seq_len = batch.seq_lens[row] - batch.query_lens[row] + last
    positions = torch.arange(seq_len, device=q.device)
    slots = metadata.block_table[row, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    k, v = (part.unsqueeze(0) for part in cache.read_slots(slots))  # one block [1, seq_len, num_kv_heads, head_dim]
    alone = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(q)], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=q.device),
        slot_mapping=positions[seq_len - len(q) :],
        block_size=seq_len,
        max_query_len=len(q),
        max_seq_len=seq_len,
    )
    return reference_attention(q.float(), (k, v), alone, scale=scale)


def _kv_dtypes(device: BenchDevice) -> list[torch.dtype]:
    float8 = device.target.fp8_dtype
    return [torch.bfloat16] if float8 is None else [torch.bfloat16, float8]


def _short(dtype: torch.dtype) -> str:
    return "fp8" if dtype.itemsize == 1 else {"bfloat16": "bf16"}.get(dtype_name(dtype), dtype_name(dtype))
