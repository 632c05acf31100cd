"""Adapters of linear layers (LoRA, arXiv:2106.09685) on a GPU: y += B (A x), with A and B of the adapter of a token.

As in Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285), one launch multiplies the tokens of all adapters by A and
another one by B. The adapters of a layer are slots in two tensors. The tokens, sorted by adapter, are divided into
tiles of one adapter each by a list that is made on the device and has a fixed size, so that a recorded step adapts to
the tokens and adapters of each replay. Few tokens have programs for several parts of the inputs; the second kernel adds
their sums, always in the same order.

Matrices have the dtype of the model. A x is summed in fp32 and rounded to that dtype; B (A x) is added to y in fp32,
and the result is rounded once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.attend import dot
from kernels.gpu.launch import BoundKernel, is_compile_only, launch
from kernels.gpu.rows import check_rows
from kernels.gpu.targets import Target
from kernels.gpu.tiles import AdapterTile, adapter_tiles
from kernels.interface import LowRank
from kernels.metadata import AdaptedTokens

_RANK_UNIT = 16
"""Ranks are padded to a multiple: the least terms of a matrix instruction."""

_SPLIT_INPUTS = 512
"""Least inputs of a part."""

_MAX_SPLITS = 16
_BLOCK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PackedAdapters:
    """Changes of one layer by the adapters of all slots.

    Attributes:
        down: [adapters, parts * rank, in]: A of each part, in rank rows, those beyond its own zero.
        up: [adapters, out, rank]: B of the rows of each part.
        ranks: [adapters] int32, terms of the largest change, a multiple of 16; 0: the adapter changes nothing.
        columns: [tiles, 3] int32: a range of columns of the result, and their part.
        rows: first and last row, exclusive, of each part.
        max_rank: largest rank that was reserved.
    """

    down: torch.Tensor
    up: torch.Tensor
    ranks: torch.Tensor
    columns: torch.Tensor
    rows: tuple[tuple[int, int], ...]
    max_rank: int

    @property
    def rank(self) -> int:
        """Rows of A of each part: the largest rank, padded."""
        return self.up.shape[2]


def reserve_adapters(
    num_adapters: int,
    max_rank: int,
    in_features: int,
    rows: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    target: Target,
) -> PackedAdapters:
    """Allocates slots of adapters, which change nothing until `set_adapter`.

    Args:
        num_adapters: slots.
        max_rank: most terms of a change.
        in_features: columns of the layer.
        rows: first and last row, exclusive, of each change that an adapter may have, ascending.
        dtype: of the model.
        device: of the tensors.
        target: its architecture.
    Raises: ValueError: rows overlap.
    """
    if any(last > first for (_, last), (first, _) in pairwise(rows)):
        raise ValueError(f"changes of a layer overlap: rows {list(rows)}")
    rank, width = max_rank + -max_rank % _RANK_UNIT, adapter_tiles(target, dtype.itemsize)[0].block_n
    columns = [
        (start, min(start + width, last), part)
        for part, (first, last) in enumerate(rows)
        for start in range(first, last, width)
    ]
    return PackedAdapters(
        torch.zeros(num_adapters, len(rows) * rank, in_features, dtype=dtype, device=device),
        torch.zeros(num_adapters, rows[-1][1], rank, dtype=dtype, device=device),
        torch.zeros(num_adapters, dtype=torch.int32, device=device),
        torch.tensor(columns, dtype=torch.int32, device=device),
        tuple(rows),
        max_rank,
    )


def set_adapter(adapters: PackedAdapters, index: int, changes: Sequence[LowRank]) -> None:
    """Writes the adapter of one slot, which no step that runs may use. Recorded steps then use the new one.

    It may be called on another thread than the one that launches steps, on whose stream it does not rely: it returns
    when the device has written everything.

    Raises: ValueError: shapes or ranks are not those that were reserved; the adapter then changes nothing.
    """
    down, up, rank = adapters.down[index], adapters.up[index], adapters.rank
    adapters.ranks[index] = 0
    for a, b, first_row in changes:
        span = (first_row, first_row + len(b))
        if (
            len(a) != b.shape[1]
            or len(a) > adapters.max_rank
            or a.shape[1] != down.shape[1]
            or span not in adapters.rows
        ):
            raise ValueError(
                f"A has shape {list(a.shape)}, B {list(b.shape)} from row {first_row}; reserved are equal ranks up to "
                f"{adapters.max_rank}, {down.shape[1]} columns, and rows {list(adapters.rows)}"
            )
    down.zero_()
    up.zero_()
    for a, b, first_row in changes:
        first = adapters.rows.index((first_row, first_row + len(b))) * rank
        down[first : first + len(a)] = a.to(down)
        up[first_row : first_row + len(b), : len(a)] = b.to(up)
    adapters.ranks[index] = max((len(a) + -len(a) % _RANK_UNIT for a, _, _ in changes), default=0)
    if down.device.type == "cuda":
        torch.cuda.synchronize(down.device)


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: PackedAdapters,
    tokens: AdaptedTokens,
    *,
    target: Target,
    num_processors: int,
    batch_invariant: bool,
) -> None:
    """Adds B (A x) to the rows of y of these tokens, in place; other rows are neither read nor written.

    Args:
        y: [T, out] in the model's dtype, contiguous; out may exceed the last row that adapters change.
        x: [T, in] in the model's dtype, contiguous.
        adapters: changes of the layer.
        tokens: M tokens sorted by adapter, then any number with adapter -1.
        target: architecture of the device; decides the tiles.
        num_processors: multiprocessors of the device; they decide how many programs share the inputs.
        batch_invariant: uses the same tile and parts for any number of tokens, so that a token has the same bits in any
            batch.
    Raises: ValueError: shapes, dtypes or strides are not as above.
    """
    num_tokens = len(tokens.indices)
    if num_tokens == 0:
        return
    check_rows(x=x, y=y)
    num_in, num_out = adapters.down.shape[2], adapters.up.shape[1]
    if x.shape[1] != num_in or y.shape[1] < num_out or not x.dtype == y.dtype == adapters.up.dtype:
        raise ValueError(
            f"x has shape {list(x.shape)} in {x.dtype}, y {list(y.shape)} in {y.dtype}; the adapters take {num_in} and "
            f"change {num_out}, in {adapters.up.dtype}"
        )
    num_places, num_parts, rank = len(adapters.ranks), len(adapters.rows), adapters.rank
    tiles = adapter_tiles(target, x.dtype.itemsize)
    if batch_invariant:
        tiles = tiles[:1]
    elif not is_compile_only():
        mean_tokens = -(-num_tokens // num_places)
        tiles = (next((tile for tile in tiles if mean_tokens <= tile.block_m), tiles[-1]),)
    for tile in tiles:
        listed = _token_tiles(tokens, num_places, tile.block_m)
        kernels = _bind(tile, num_in, y.shape[1], num_out, rank, num_parts)
        num_programs = len(listed) * kernels.rank_tiles
        most = min(_MAX_SPLITS, max(1, num_in // _SPLIT_INPUTS))
        num_splits = most if batch_invariant else max(1, min(most, num_processors // num_programs))
        split_inputs = -(-num_in // (num_splits * tile.block_k)) * tile.block_k
        hidden = torch.empty(num_splits, num_tokens, num_parts * rank, dtype=torch.float32, device=x.device)
        kernels.down(
            (len(listed), kernels.rank_tiles, num_splits),
            x, adapters.down, adapters.ranks, tokens.indices, listed, hidden, num_tokens, split_inputs,
        )  # fmt: skip
        kernels.up(
            (len(listed), len(adapters.columns)),
            hidden, adapters.up, adapters.ranks, adapters.columns, tokens.indices, listed, y, num_tokens, num_splits,
        )  # fmt: skip


def _token_tiles(tokens: AdaptedTokens, num_places: int, block_m: int) -> torch.Tensor:
    """Returns tiles of up to block_m tokens of one adapter: [tiles, 3] int32, the adapter and the range of places in
    `tokens`; the adapter is -1 where there is no tile. They are made once for all layers of a step.
    """
    key = num_places, block_m
    if key not in tokens.derived:
        num_tokens = len(tokens.adapters)
        num_tiles = num_tokens // block_m + min(num_tokens, num_places)
        tiles = torch.full((num_tiles, 3), -1, dtype=torch.int32, device=tokens.adapters.device)
        launch(
            _list_kernel,
            (num_places,),
            tokens.adapters,
            tiles,
            num_tokens,
            BLOCK_M=block_m,
            BLOCK_TOKENS=_BLOCK_TOKENS,
            num_warps=4,
        )
        tokens.derived[key] = tiles
    listed: torch.Tensor = tokens.derived[key]
    return listed


class _Kernels(NamedTuple):
    """Kernels of a layer and a tile.

    Attributes:
        down: multiplies by A.
        up: multiplies by B and adds to the result.
        rank_tiles: tiles of the rows of A.
    """

    down: BoundKernel
    up: BoundKernel
    rank_tiles: int


@cache
def _bind(tile: AdapterTile, num_in: int, num_columns: int, num_out: int, rank: int, num_parts: int) -> _Kernels:
    block_rank = next(size for size in (tile.max_block_rank, 32, 16) if rank % size == 0)
    options = {
        "RANK": rank,
        "NUM_PARTS": num_parts,
        "BLOCK_M": tile.block_m,
        "BLOCK_RANK": block_rank,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return _Kernels(
        BoundKernel(_down_kernel, NUM_IN=num_in, BLOCK_K=tile.block_k, **options),
        BoundKernel(_up_kernel, NUM_COLUMNS=num_columns, NUM_OUT=num_out, BLOCK_N=tile.block_n, **options),
        num_parts * rank // block_rank,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _list_kernel(  # type: ignore[no-untyped-def]
    adapters_ptr,
    tiles_ptr,
    num_tokens,
    BLOCK_M: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Each program lists the tiles of one adapter.

    The first tile of an adapter is number f // BLOCK_M + r, where f tokens and r adapters come before it. The tiles of
    the next one begin later, since each adapter has at most one tile that is not full.
    """
    adapter = tl.program_id(0)
    first, num_own, num_before = 0, 0, 0
    for start in range(0, num_tokens, BLOCK_TOKENS):
        places = start + tl.arange(0, BLOCK_TOKENS)
        mask = places < num_tokens
        adapters = tl.load(adapters_ptr + places, mask=mask, other=-1)
        previous = tl.load(adapters_ptr + places - 1, mask=mask & (places > 0), other=-1)
        is_before = (adapters >= 0) & (adapters < adapter)
        first += tl.sum(is_before.to(tl.int32), 0)
        num_own += tl.sum((adapters == adapter).to(tl.int32), 0)
        num_before += tl.sum((is_before & (adapters != previous)).to(tl.int32), 0)
    tile_ptr = tiles_ptr + 3 * (first // BLOCK_M + num_before)
    for start in range(0, num_own, BLOCK_M):
        tl.store(tile_ptr, adapter)
        tl.store(tile_ptr + 1, first + start)
        tl.store(tile_ptr + 2, first + tl.minimum(start + BLOCK_M, num_own))
        tile_ptr += 3


@triton.jit(do_not_specialize=["num_tokens", "split_inputs"])
def _down_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    down_ptr,
    ranks_ptr,
    indices_ptr,
    tiles_ptr,
    hidden_ptr,
    num_tokens,
    split_inputs,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes BLOCK_RANK columns of A x of a tile's tokens to hidden [splits, num_tokens, NUM_PARTS * RANK].

    split_inputs, a multiple of BLOCK_K, are the inputs of a program. Columns beyond the adapter's rank are not written.
    """
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    adapter = tl.load(tile_ptr).to(tl.int64)
    first_column, split = tl.program_id(1) * BLOCK_RANK, tl.program_id(2)
    if first_column % RANK < tl.load(ranks_ptr + adapter, mask=adapter >= 0, other=0):
        places = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        is_token = places < tl.load(tile_ptr + 2)
        rows = tl.load(indices_ptr + places, mask=is_token, other=0)
        columns = first_column + tl.arange(0, BLOCK_RANK)
        x_ptrs = x_ptr + rows[:, None] * NUM_IN
        down_ptrs = down_ptr + (adapter * (NUM_PARTS * RANK) + columns)[None, :] * NUM_IN
        acc = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
        for first in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, NUM_IN), BLOCK_K):
            inputs = first + tl.arange(0, BLOCK_K)
            x_mask = is_token[:, None]
            if NUM_IN % BLOCK_K:
                x_mask = x_mask & (inputs < NUM_IN)[None, :]
                down = tl.load(down_ptrs + inputs[:, None], mask=(inputs < NUM_IN)[:, None], other=0.0)
            else:
                down = tl.load(down_ptrs + inputs[:, None])
            acc = dot(tl.load(x_ptrs + inputs[None, :], mask=x_mask, other=0.0), down, acc)
        hidden_rows = (split.to(tl.int64) * num_tokens + places)[:, None]
        tl.store(hidden_ptr + hidden_rows * (NUM_PARTS * RANK) + columns[None, :], acc, mask=is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _up_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr,
    up_ptr,
    ranks_ptr,
    columns_ptr,
    indices_ptr,
    tiles_ptr,
    y_ptr,
    num_tokens,
    num_splits,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds up to BLOCK_N columns of B (A x) of a tile's tokens to y [T, NUM_COLUMNS]."""
    tile_ptr = tiles_ptr + 3 * tl.program_id(0)
    adapter = tl.load(tile_ptr).to(tl.int64)
    rank = tl.load(ranks_ptr + adapter, mask=adapter >= 0, other=0)
    if rank > 0:
        places = tl.load(tile_ptr + 1) + tl.arange(0, BLOCK_M)
        is_token = places < tl.load(tile_ptr + 2)
        rows = tl.load(indices_ptr + places, mask=is_token, other=0)
        range_ptr = columns_ptr + 3 * tl.program_id(1)
        columns = tl.load(range_ptr) + tl.arange(0, BLOCK_N)
        is_column = columns < tl.load(range_ptr + 1)
        terms = tl.arange(0, BLOCK_RANK)
        hidden_ptrs = hidden_ptr + places.to(tl.int64)[:, None] * (NUM_PARTS * RANK) + terms[None, :]
        hidden_ptrs += tl.load(range_ptr + 2) * RANK
        up_ptrs = up_ptr + (adapter * NUM_OUT + columns)[None, :] * RANK + terms[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, rank, BLOCK_RANK):
            # ranks of this adapter may end in a block, whose other terms are not written
            mask = is_token[:, None] & (first + terms < rank)[None, :]
            hidden = tl.zeros((BLOCK_M, BLOCK_RANK), tl.float32)
            split_ptrs = hidden_ptrs + first
            for _ in range(num_splits):
                hidden += tl.load(split_ptrs, mask=mask, other=0.0)
                split_ptrs += num_tokens.to(tl.int64) * (NUM_PARTS * RANK)
            up = tl.load(up_ptrs + first, mask=is_column[None, :], other=0.0)
            acc = dot(hidden.to(up.dtype), up, acc)
        y_ptrs = y_ptr + rows[:, None] * NUM_COLUMNS + columns[None, :]
        mask = is_token[:, None] & is_column[None, :]
        total = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32) + acc
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=mask)
