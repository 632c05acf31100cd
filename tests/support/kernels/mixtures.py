"""Mixtures of experts in fp64, with bounds of what the roundings of kernels may change."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from kernels.interface import ExpertChoice, Routing

if TYPE_CHECKING:  # and with it Triton, which a CPU does not need
    from kernels.gpu.expert_rows import ExpertRows

_LAST = 2.0**-24
"""Half the distance of fp32 numbers above 1: a rounding."""

Terms = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


def random_choice(seed: int, num_tokens: int, top_k: int, num_experts: int) -> ExpertChoice:
    """Makes weights of both signs, some zero; experts in random order, and never the second of those with a choice."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if top_k < num_experts:
        scores[:, 1] = -1
    experts = scores.topk(top_k).indices
    weights = 2.5 * torch.randn(num_tokens, top_k, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.1] = 0
    return ExpertChoice(experts, weights)


def assert_lists_every_pair(rows: "ExpertRows", expert_of: torch.Tensor, num_experts: int, block_m: int) -> None:
    """Checks a work list: each pair is in one tile of its expert, sorted, in as few tiles of block_m as that takes.

    expert_of: [pairs], the expert of each.
    """
    pairs = rows.pairs.cpu()
    assert pairs.tolist() == expert_of.argsort(stable=True).tolist()
    listed: list[int] = []
    for expert, first, end in rows.tiles.tolist():
        if expert >= 0:
            assert first < end <= first + block_m
            assert expert_of[pairs[first:end]].eq(expert).all()
            listed += range(first, end)
    assert listed == list(range(len(pairs)))
    full_or_last = -(-expert_of.bincount(minlength=num_experts) // block_m)
    assert (rows.tiles[:, 0] >= 0).sum() == full_or_last.sum()


def exact_mixture(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    routing: Routing,
    dtype: torch.dtype = torch.float32,
    *,
    terms: Terms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `exact_chosen_mixture`, by logits [T, experts] of the router; of equal ones, common in 16 bits, the first."""
    chosen = logits.double().sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = logits.double().softmax(dim=1).gather(1, chosen)
    if routing.normalizes:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return exact_chosen_mixture(x, ExpertChoice(chosen, weights), gate_up, down, routing, dtype, terms=terms)


def exact_chosen_mixture(
    x: torch.Tensor,
    choice: ExpertChoice,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    routing: Routing,
    dtype: torch.dtype = torch.float32,
    *,
    terms: Terms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token by itself, in fp64.

    Args:
        x: [T, in].
        choice: of each token.
        gate_up, down: [out, in] of each expert.
        routing: with one of the two plain gates.
        dtype: in which results of layers, of the gate and of the mixture are rounded.
        terms: magnitudes of the numbers by which inputs are multiplied, which may cancel; None: those of the weights.
    Returns: the values, and how far results may be from them that round to dtype what the layers, the gate and the sum
        of experts return, and add up in fp32, with a rounding for each term and four for each group of 16 of them.
    """
    rounding = torch.finfo(dtype).eps  # Triton's interpreter truncates to bfloat16
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    gate_of: Callable[[torch.Tensor], torch.Tensor]
    gate_of = torch.nn.functional.silu if routing.gate == "silu_and_mul" else gelu
    terms = terms or ([matrix.abs() for matrix in gate_up], [matrix.abs() for matrix in down])
    values, bounds = [], []
    for token, chosen, weights in zip(x.double(), choice.experts, choice.weights.double(), strict=True):
        total, allowed = (torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(2))
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            first, second = gate_up[expert].double(), down[expert].double()
            first_terms, second_terms = terms[0][expert].double(), terms[1][expert].double()
            hidden = first @ token
            error = _roundings(len(token)) * (first_terms @ token.abs()) + rounding * hidden.abs()
            (gate, up), (gate_error, up_error) = hidden.chunk(2), error.chunk(2)
            gated = gate_of(gate) * up
            error = 1.13 * gate_error * (up.abs() + up_error) + gate_of(gate).abs() * up_error  # |gate'| < 1.13
            error += (rounding + 16 * _LAST) * (gated.abs() + error)
            result = second @ gated
            error = second.abs() @ error + _roundings(len(gated)) * (second_terms @ (gated.abs() + error))
            error += rounding * (result.abs() + error)
            total += weight * result
            allowed += weight.abs() * (error + 32 * _LAST * (result.abs() + error))
        values.append(total)
        bounds.append(allowed + rounding * (total.abs() + allowed))
    return torch.stack(values), torch.stack(bounds)


def _roundings(num_terms: int) -> float:
    return 1.25 * num_terms * _LAST
