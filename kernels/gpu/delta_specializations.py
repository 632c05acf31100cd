"""Calls of the gated delta rule that together compile all its kernels; see `kernels.gpu.specializations`."""

import random
from collections.abc import Iterator
from functools import partial

import torch

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.dtypes import dtype_name
from kernels.gpu.delta_rule import delta_rule
from kernels.gpu.row_specializations import Call, model_dtypes
from kernels.gpu.targets import Target
from kernels.metadata import AttentionMetadata
from kernels.scale_groups import FP8_BLOCK_SIZE

_META = torch.device("meta")
_FEW = (DeltaHeads(16, 128, 32, 128, 4), DeltaHeads(16, 128, 48, 128, 4), DeltaHeads(4, 256, 8, 64, 8))
_SIZES = (
    *_FEW,
    DeltaHeads(16, 128, 16, 128, 4),
    DeltaHeads(4, 16, 4, 16, 2),
    DeltaHeads(8, 32, 8, 64, 3),
    DeltaHeads(8, 64, 16, 32, 4),
    DeltaHeads(6, 256, 12, 256, 4),
)


def delta_calls(target: Target, everything: bool) -> Iterator[Call]:
    """Yields layers by their heads, of Qwen3.5 first, by dtype and by format of the results."""
    for dtype in model_dtypes(target, everything) if everything else (target.half_dtype, torch.float32):
        for heads in _SIZES if everything else _FEW:
            yield _call(3, 2, heads, dtype, None, None)
            if target.fp8_dtype is not None:
                yield _call(3, 2, heads, dtype, target.fp8_dtype, None)
                if heads.value_size % FP8_BLOCK_SIZE == 0:
                    yield _call(3, 2, heads, dtype, target.fp8_dtype, FP8_BLOCK_SIZE)


def live_delta_calls(target: Target, generator: random.Random) -> Iterator[Call]:
    """Yields the same layers with random numbers of tokens and rows."""
    for num_tokens in (1, 16, 129, *(generator.randint(1, 20000) for _ in range(8))):
        num_rows = generator.randint(1, min(num_tokens, 1024))
        for heads in _FEW:
            yield _call(num_tokens, num_rows, heads, target.half_dtype, None, None)


def _call(
    num_tokens: int,
    num_rows: int,
    heads: DeltaHeads,
    dtype: torch.dtype,
    quantize: torch.dtype | None,
    group_size: int | None,
) -> Call:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    num_heads, num_columns = heads.num_value_heads, heads.num_channels + heads.value_size
    rows = empty(num_tokens, num_columns + 2 * num_heads, dtype=dtype)
    weights = DeltaWeights(
        heads,
        conv=empty(heads.conv_width, heads.num_channels),
        decay=empty(num_heads),
        dt_bias=empty(num_heads),
        norm=empty(heads.value_dim),
        eps=1e-6,
    )
    metadata = AttentionMetadata(
        query_start_loc=empty(num_rows + 1, dtype=torch.int32),
        seq_lens=empty(num_rows, dtype=torch.int32),
        block_table=empty(num_rows, 1, dtype=torch.int32),
        slot_mapping=empty(num_tokens, dtype=torch.int64),
        block_size=16,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        state_slots=empty(num_rows, dtype=torch.int32),
    )
    make = partial(
        delta_rule,
        rows[:, :num_columns],
        rows[:, num_columns:],
        weights,
        DeltaStates.zeros(heads, 1024, _META),
        metadata,
        quantize=quantize,
        group_size=group_size,
    )
    form = "" if quantize is None else ", to 8 bits" if group_size is None else f", to 8 bits by {group_size}"
    return Call(
        f"{dtype_name(dtype)}, {heads.num_key_heads} key heads of {heads.key_dim}, {num_heads} value heads of "
        f"{heads.value_dim}, convolution of {heads.conv_width}{form}",
        make,
    )
