"""`KernelOps` in plain fp32 PyTorch: the definition that the fast families are tested against."""

from collections.abc import Sequence

import torch

from kernels.fp8_weights import dequantized
from kernels.grouped_weights import GroupedWeights
from kernels.interface import ExpertChoice, LowRank, Routing, Step
from kernels.metadata import AdaptedTokens, StepInputs
from kernels.microscaled_weights import Fp4Weights, MicroscaledWeights
from kernels.reference.delta_rule import delta_rule
from kernels.reference.gate import add_shared, gate_and_mul, gate_columns
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotate_and_store import rotate_and_store
from kernels.reference.sample import sample
from kernels.reference.soft_cap import soft_cap

Weights = tuple[torch.Tensor, torch.Tensor | None]
Experts = tuple[Weights | None, Sequence[Weights], Sequence[Weights], Routing]
Cache = tuple[torch.Tensor, torch.Tensor]


class ReferenceOps:
    """Implements `kernels.interface.KernelOps`.

    A cache is keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]. Weights and activations may be on
    any device, which must be that of the cache; sampling takes place on the CPU.
    """

    name = "reference"

    rotate_and_store = staticmethod(rotate_and_store)
    paged_attention = staticmethod(paged_attention)
    gate_columns = staticmethod(gate_columns)
    add_shared = staticmethod(add_shared)
    delta_rule = staticmethod(delta_rule)
    gate_and_mul = staticmethod(gate_and_mul)
    soft_cap = staticmethod(soft_cap)
    sample = staticmethod(sample)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Uses this device for caches."""
        self._device = device

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, for_logits: bool = False) -> Weights:
        """Returns the weights unchanged."""
        return weight, bias

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Weights:
        """Returns the dequantized weights."""
        return dequantized(values, scales).to(dtype), bias

    def pack_grouped(self, weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> Weights:
        """Returns the dequantized weights."""
        return weights.dequantized(dtype), bias

    def pack_microscaled(self, weights: MicroscaledWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> Weights:
        """Returns the dequantized weights."""
        return weights.dequantized(dtype), bias

    def pack_fp4(self, weights: Fp4Weights, bias: torch.Tensor | None, dtype: torch.dtype) -> Weights:
        """Returns the dequantized weights."""
        return weights.dequantized(dtype), bias

    def make_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> Cache:
        """Allocates keys and values, filled with zeros."""
        k = torch.zeros(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=self._device)
        return k, torch.zeros_like(k) if value_dim is None else k[..., :value_dim]

    def compile_step(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        mixes_torch: bool = False,
        yields_logits: bool = True,
    ) -> Step:
        """Returns the step itself."""
        return step

    def pack_table(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> torch.Tensor:
        """Returns the dequantized matrix."""
        return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized(dtype)

    def pack_tied(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> tuple[torch.Tensor, Weights]:
        """Returns the dequantized matrix for both uses."""
        table = self.pack_table(matrix, dtype)
        return table, (table, None)

    def gather_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Indexes the table."""
        return table[indices]

    def linear(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Multiplies by the weight matrix and adds the bias, in the dtype of x."""
        weight, bias = weights
        return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def reserve_adapters(
        self, num_adapters: int, max_rank: int, in_features: int, rows: Sequence[tuple[int, int]]
    ) -> list[Sequence[LowRank]]:
        """Returns adapters that change nothing; allocates no memory."""
        return [()] * num_adapters

    def set_adapter(self, adapters: list[Sequence[LowRank]], index: int, changes: Sequence[LowRank]) -> None:
        """Keeps the matrices on the device."""
        device = self._device
        adapters[index] = [LowRank(a.to(device), b.to(device), first_row) for a, b, first_row in changes]

    def add_adapters(
        self, y: torch.Tensor, x: torch.Tensor, adapters: Sequence[Sequence[LowRank]], tokens: AdaptedTokens
    ) -> None:
        """Multiplies the tokens of one adapter at a time."""
        for index, changes in enumerate(adapters):
            chosen = tokens.indices[tokens.adapters == index]
            for a, b, first_row in changes:
                y[chosen, first_row : first_row + len(b)] += (x[chosen] @ a.T.to(x.dtype)) @ b.T.to(x.dtype)

    def pack_experts(
        self,
        router: torch.Tensor | None,
        gate_up: Sequence[Weights],
        down: Sequence[Weights],
        routing: Routing,
        router_bias: torch.Tensor | None = None,
    ) -> Experts:
        """Returns the weights unchanged."""
        return None if router is None else (router, router_bias), gate_up, down, routing

    def mix_experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Chooses experts by the softmax of the router's results."""
        router, _, _, routing = experts
        if router is None:
            raise ValueError("the experts have no router")
        probabilities = self.linear(x, router).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(routing.top_k)
        if routing.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        chosen, order = chosen.sort(dim=-1)
        return self.mix_chosen_experts(x, experts, ExpertChoice(chosen, weights.gather(-1, order)))

    def mix_chosen_experts(self, x: torch.Tensor, experts: Experts, choice: ExpertChoice) -> torch.Tensor:
        """Computes one expert after the other, on the tokens that it was chosen for."""
        _, gate_up, down, routing = experts
        choice.check(x, routing.top_k)
        is_expert = (choice.experts >= 0) & (choice.experts < len(gate_up))
        weights = choice.weights.masked_fill(~is_expert, torch.nan).to(x.dtype)
        results = x.new_zeros(*choice.experts.shape, down[0][0].shape[0])
        for expert, layers in enumerate(zip(gate_up, down, strict=True)):
            tokens, places = torch.where(choice.experts == expert)
            if len(tokens):
                gated = self.gate_and_mul(self.linear(x[tokens], layers[0]), routing.gate)
                results[tokens, places] = self.linear(gated, layers[1])
        out = torch.zeros_like(results[:, 0])
        for place in range(routing.top_k):
            out += results[:, place] * weights[:, place, None]
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False) -> torch.Tensor:
        """Returns a tensor in either case."""
        return rms_norm(x, weight, eps)

    def norm_columns(self, x: torch.Tensor, first: int, weight: torch.Tensor, eps: float) -> None:
        """Norms the columns in place."""
        columns = x[:, first : first + len(weight)]
        columns.copy_(rms_norm(columns, weight, eps))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tensors in either case."""
        return add_rms_norm(x, residual, weight, eps)
