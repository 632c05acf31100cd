"""Chooses the experts of each token, or takes the caller's choice, and lists the tokens of each expert.

The list is the work list of `kernels.gpu.experts`. It is made on the device and has a fixed size, so that a CUDA graph
that contains it adapts to each replay.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import launch
from kernels.interface import ExpertChoice, Routing

_BLOCK_PAIRS = 1024
_BLOCK_TILES = 128


class ExpertRows(NamedTuple):
    """Pairs of a token and one of its experts; pair p is of token p // top_k.

    Attributes:
        weights: [T, top_k] fp32: of the experts of a token, in the order of their numbers or of the caller's choice.
        pairs: [T * top_k] int32, sorted by expert, then by number.
        tiles: [N, 3] int32: an expert and the range of `pairs` of up to block_m of its pairs; the expert is -1 where
            there is no tile.
        block_m: most pairs of a tile.
    """

    weights: torch.Tensor
    pairs: torch.Tensor
    tiles: torch.Tensor
    block_m: int


def expert_rows(logits: torch.Tensor, routing: Routing, block_m: int) -> ExpertRows:
    """Chooses the experts with the largest logits, of equal ones the first.

    Args:
        logits: [T, num_experts] of the router, contiguous, fp32, fp16 or bf16. NaN is the smallest, and makes the
            weights of its token NaN.
        routing: how many experts are chosen, and whether their weights add up to one.
        block_m: most pairs of a tile.
    """
    num_tokens, num_experts = logits.shape
    weights, experts, counts = _empty_choice(num_tokens, routing.top_k, num_experts, logits.device)
    block_experts = triton.next_power_of_2(num_experts)
    launch(
        _choose_kernel,
        (num_tokens,),
        logits,
        weights,
        experts,
        counts,
        NUM_EXPERTS=num_experts,
        TOP_K=routing.top_k,
        NORMALIZES=routing.normalizes,
        BLOCK=block_experts,
        num_warps=1 if block_experts <= 256 else 4,
    )
    return _listed(weights, experts, counts, block_m)


def rows_of_choice(choice: ExpertChoice, num_experts: int, block_m: int) -> ExpertRows:
    """Takes the caller's choice.

    Args:
        choice: of T tokens. A number that is not of an expert becomes the first expert, with a weight of NaN, so that
            nothing outside of the experts' memory is read.
        num_experts: how many there are.
        block_m: most pairs of a tile.
    """
    num_tokens, top_k = choice.experts.shape
    num_pairs = num_tokens * top_k
    weights, experts, counts = _empty_choice(num_tokens, top_k, num_experts, choice.experts.device)
    launch(
        _take_kernel,
        (triton.cdiv(num_pairs, _BLOCK_PAIRS),),
        *choice,
        weights,
        experts,
        counts,
        num_pairs,
        num_experts,
        BLOCK=_BLOCK_PAIRS,
        num_warps=4,
    )
    return _listed(weights, experts, counts, block_m)


def _empty_choice(
    num_tokens: int, top_k: int, num_experts: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocates weights [T, top_k] fp32 and experts [T * top_k] int32, and zeros to count the pairs of each expert."""
    return (
        torch.empty(num_tokens, top_k, dtype=torch.float32, device=device),
        torch.empty(num_tokens * top_k, dtype=torch.int32, device=device),
        torch.zeros(num_experts, dtype=torch.int32, device=device),
    )


def _listed(weights: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, block_m: int) -> ExpertRows:
    """Lists the pairs by expert; counts [num_experts] is how many each has."""
    num_pairs, num_experts, device = len(experts), len(counts), experts.device
    num_tiles = num_pairs // block_m + min(num_pairs, num_experts)  # each expert may have one that is not full
    rows = ExpertRows(
        weights=weights,
        pairs=torch.empty(num_pairs, dtype=torch.int32, device=device),
        tiles=torch.empty(num_tiles, 3, dtype=torch.int32, device=device),
        block_m=block_m,
    )
    launch(
        _list_kernel,
        (num_experts if num_pairs else 0,),
        experts,
        counts,
        rows.pairs,
        rows.tiles,
        num_pairs,
        num_tiles,
        NUM_EXPERTS=num_experts,
        BLOCK_M=block_m,
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_PAIRS=_BLOCK_PAIRS,
        BLOCK_TILES=_BLOCK_TILES,
        num_warps=4,
    )
    return rows


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes experts [T, TOP_K] and their weights of one token, and counts the tokens of each expert."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    is_expert = numbers < NUM_EXPERTS
    logits = tl.load(logits_ptr + token * NUM_EXPERTS + numbers, mask=is_expert, other=-float("inf")).to(tl.float32)
    values = tl.where(logits == logits, logits, -float("inf"))
    largest = tl.max(values, 0)
    weights = tl.exp(logits - tl.where(largest > -float("inf"), largest, 0.0))
    weights = weights / tl.sum(weights, 0)
    is_left = is_expert
    for _ in tl.static_range(TOP_K):
        largest = tl.max(tl.where(is_left, values, -float("inf")), 0)
        first = tl.min(tl.where(is_left & (values == largest), numbers, BLOCK), 0)
        is_left = is_left & (numbers != first)
    is_chosen = is_expert & (is_left == 0)
    if NORMALIZES:
        weights = tl.div_rn(weights, tl.sum(tl.where(is_chosen, weights, 0.0), 0))  # one expert has exactly 1
    places = token * TOP_K + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(weights_ptr + places, weights, mask=is_chosen)
    tl.store(experts_ptr + places, numbers, mask=is_chosen)
    tl.atomic_add(counts_ptr + numbers, 1, mask=is_chosen, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _take_kernel(  # type: ignore[no-untyped-def]
    given_experts_ptr,
    given_weights_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    num_pairs,
    num_experts,
    BLOCK: tl.constexpr,
):
    """Copies experts and weights of BLOCK pairs, and counts the pairs of each expert."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = pairs < num_pairs
    given = tl.load(given_experts_ptr + pairs, mask=is_pair, other=0)
    is_expert = (given >= 0) & (given < num_experts)
    experts = tl.where(is_expert, given, 0).to(tl.int32)
    weights = tl.load(given_weights_ptr + pairs, mask=is_pair, other=0.0)
    tl.store(weights_ptr + pairs, tl.where(is_expert, weights, float("nan")), mask=is_pair)
    tl.store(experts_ptr + pairs, experts, mask=is_pair)
    tl.atomic_add(counts_ptr + experts, 1, mask=is_pair, sem="relaxed")


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _list_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Each program lists the pairs and tiles of one expert; the last one also the tiles that there are not."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK_EXPERTS)
    counts = tl.load(counts_ptr + numbers, mask=numbers < NUM_EXPERTS, other=0)
    first_pair = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    end_pair = first_pair + tl.sum(tl.where(numbers == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(numbers < expert, (counts + BLOCK_M - 1) // BLOCK_M, 0), 0)
    end_tile = first_tile + tl.cdiv(end_pair - first_pair, BLOCK_M)

    last_tile = end_tile
    if expert == NUM_EXPERTS - 1:
        last_tile = num_tiles
    for start in range(first_tile, last_tile, BLOCK_TILES):
        tiles = start + tl.arange(0, BLOCK_TILES)
        firsts = first_pair + (tiles - first_tile) * BLOCK_M
        mask = tiles < last_tile
        tl.store(tiles_ptr + 3 * tiles, tl.where(tiles < end_tile, expert, -1), mask=mask)
        tl.store(tiles_ptr + 3 * tiles + 1, firsts, mask=mask)
        tl.store(tiles_ptr + 3 * tiles + 2, tl.minimum(firsts + BLOCK_M, end_pair), mask=mask)

    num_listed = first_pair
    for start in range(0, num_pairs, BLOCK_PAIRS):
        pairs = start + tl.arange(0, BLOCK_PAIRS)
        is_own = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=-1) == expert
        tl.store(pairs_ptr + num_listed + tl.cumsum(is_own.to(tl.int32), 0) - 1, pairs, mask=is_own)
        num_listed += tl.sum(is_own.to(tl.int32), 0)
