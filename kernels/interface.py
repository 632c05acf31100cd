"""The interface between model and kernels: one set of operations, several families of implementations.

This module imports no family: see `kernels.families`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch

from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.gates import Gate
from kernels.grouped_weights import GroupedWeights
from kernels.metadata import AdaptedTokens, AttentionMetadata, StepInputs
from kernels.microscaled_weights import Fp4Weights, MicroscaledWeights
from kernels.sampling import SampledTokens, SamplingBatch

LinearWeights: TypeAlias = Any
"""Weights of a linear layer as returned by `pack_linear`; opaque outside of the family that packed them."""

LinearInput: TypeAlias = Any
"""Rows [T, in] for `linear` of the same family: a tensor, or an opaque quantized form."""


class LowRank(NamedTuple):
    """A change of rows of the weights of a linear layer: B A is added to them (LoRA, arXiv:2106.09685).

    Attributes:
        a: [rank, in] fp32.
        b: [rows, rank] fp32.
        first_row: of the rows.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_row: int = 0


class Routing(NamedTuple):
    """How a mixture of experts chooses those of a token: the `top_k` with the largest probabilities.

    Attributes:
        top_k: experts of a token.
        normalizes: whether these probabilities are scaled to a sum of one; no effect on an `ExpertChoice`.
        gate: between the layers of an expert.
    """

    top_k: int
    normalizes: bool
    gate: Gate


class ExpertChoice(NamedTuple):
    """The experts of each token, chosen by the caller instead of by a router of `pack_experts`.

    Attributes:
        experts: [T, top_k] int64, numbers of different experts in each row, in any order.
        weights: [T, top_k] fp32, the factor of each: any finite number, also zero; they need not add up to one.
    """

    experts: torch.Tensor
    weights: torch.Tensor

    def check(self, x: torch.Tensor, top_k: int) -> None:
        """Raises ValueError: not [T, top_k] for the rows of x, of another dtype or device, or not contiguous."""
        for name, tensor, dtype in (("experts", self.experts, torch.int64), ("weights", self.weights, torch.float32)):
            if tensor.shape != (len(x), top_k) or tensor.dtype is not dtype or tensor.device != x.device:
                raise ValueError(
                    f"{name} of the choice are {list(tensor.shape)} {tensor.dtype} on {tensor.device}, expected "
                    f"{[len(x), top_k]} {dtype} on {x.device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} of the choice have strides {tensor.stride()}; expected whole rows")


Table: TypeAlias = Any
"""Rows that `gather_rows` takes: a tensor, or what `pack_table` or `pack_tied` returned."""

Experts: TypeAlias = Any
"""Experts of a layer as returned by `pack_experts`; opaque outside of the family that packed them."""

Adapters: TypeAlias = Any
"""Changes of a linear layer as returned by `reserve_adapters`; opaque outside of the family that packed them."""

KVCache: TypeAlias = Any
"""Keys and values of one layer as returned by `make_kv_cache`; opaque outside of the family that made them."""

Step: TypeAlias = Callable[[StepInputs], torch.Tensor]
"""A step of the model: inputs -> logits [S, vocab_size] fp32 of the rows that sample, in `inputs.logits` if given; or
of a pipeline stage: inputs -> the residual stream [T or S, hidden_size].
"""

Quantization: TypeAlias = Literal["int8"]


class KernelOps(Protocol):
    """Operations of a model on a ragged batch of T tokens; tensors are contiguous in their last dimension."""

    name: str

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, for_logits: bool = False
    ) -> LinearWeights:
        """Lays out weight [out, in] and bias [out] for `linear`; may quantise, and may share their memory.

        for_logits marks the output head, whose errors become errors of log-probabilities; it may stay unquantized.
        """
        ...

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeights:
        """Lays out 8-bit checkpoint weights for `linear`: values [out, in] float8_e4m3fn times scales.

        Scales are per tensor, [1], per output channel, [out] or [out, 1], or per block of 128 x 128 weights,
        [out / 128, in / 128]. dtype is that of the model and of bias [out]. Without 8-bit products, or for layers or
        scales they do not support, the dequantized weights are used in dtype.
        """
        ...

    def pack_grouped(self, weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> LinearWeights:
        """Lays out a checkpoint's weights of 4 to 8 bits for `linear`; dtype is that of the model and of bias [out].

        Families without such products use the dequantized weights in dtype.
        """
        ...

    def pack_microscaled(
        self, weights: MicroscaledWeights, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeights:
        """Lays out an expert's weights in MXFP4 for `pack_experts`; dtype is that of the model and of bias [out].

        Families without such products use the dequantized weights in dtype.
        """
        ...

    def pack_fp4(self, weights: Fp4Weights, bias: torch.Tensor | None, dtype: torch.dtype) -> LinearWeights:
        """Lays out weights in 4-bit floats for `linear`, those in NVFP4 for `pack_experts` too.

        dtype is that of the model and of bias [out]. Families without such products use the same weights as integers,
        or the dequantized ones in dtype.
        """
        ...

    def make_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> KVCache:
        """Allocates keys and values of one layer, filled with zeros.

        With value_dim the values are the first numbers of the keys, so many of each (latents), and take no memory.

        Raises: ValueError: the dtype, or value_dim, is not supported. RuntimeError: out of memory.
        """
        ...

    def compile_step(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        mixes_torch: bool = False,
        yields_logits: bool = True,
    ) -> Step:
        """Compiles or records a step, so that it computes the same faster.

        Args:
            step: calls these operations; nothing else in it depends on its inputs, except with mixes_torch.
            largest: the whole persistent buffers; inputs of later steps are views of their beginnings.
            decode_sizes: batch sizes of decode-only steps (one token per row) to record.
            mixed_sizes: numbers of tokens of other steps to record, with min(tokens, rows of `largest`) logits.
            mixes_torch: the step computes with torch too.
            yields_logits: whether the result is logits. That of a pipeline stage is not, and it has no sizes to record.
        Returns: the compiled step. Its result is valid until its next call.
        """
        ...

    def pack_table(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> Table:
        """Packs an embedding [N, n] for `gather_rows`; dtype is that of the model.

        Families that gather no rows of integers use the dequantized weights in dtype.
        """
        ...

    def pack_tied(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> tuple[Table, LinearWeights]:
        """Packs an embedding [N, n] that is the output head too; returns what `gather_rows` and `linear` take.

        They share memory if the family gathers rows of the head's weights.
        """
        ...

    def gather_rows(self, table: Table, indices: torch.Tensor) -> torch.Tensor:
        """Table [N, n], indices [T] int64 -> rows [T, n]: embeddings, and hidden states of the rows that sample.

        The table is a tensor, or from `pack_table` or `pack_tied`. The result has the dtype of activations, to which a
        family may widen a table of weights.
        """
        ...

    def linear(self, x: LinearInput, weights: LinearWeights) -> torch.Tensor:
        """Computes a linear layer: x [T, in] @ weight [out, in]^T + bias [out] -> [T, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False) -> LinearInput:
        """RMSNorm over the last dimension (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight. x is [T, n].

        With for_linear the result may only be passed to `linear`; without, it is a tensor.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False
    ) -> tuple[LinearInput, torch.Tensor]:
        """Adds, then norms: residual' = x + residual; returns (rms_norm(residual'), residual').

        May write residual' into `residual`. for_linear as in `rms_norm`; residual' is always a tensor.
        """
        ...

    def norm_columns(self, x: torch.Tensor, first: int, weight: torch.Tensor, eps: float) -> None:
        """RMSNorm over columns first:first + n of x [T, m], in place, with weight [n]."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: KVCache,
        slot_mapping: torch.Tensor,
        *,
        head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Rotates queries and keys (arXiv:2104.09864, half-split layout) and writes keys and values to the cache.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], queries, keys, values, without values if they are
                part of the keys; may be written to, and may be columns of wider rows.
            positions: [T] int64, rows of the tables.
            cos, sin: [max_positions, head_dim // 2] fp32.
            kv_cache: cache of the layer.
            slot_mapping: [T] int64, block_id * block_size + offset of each token.
            head_norms: [head_dim] each: RMSNorm of every query and key head before the rotation.
            eps: added to the mean square in these norms.
        Returns: rotated queries [T, num_heads, head_dim], which may share memory with qkv.
        """
        ...

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of a ragged batch over a paged cache.

        q [T, num_heads, head_dim] -> [T, num_heads * size of a value]. A token at position p sees keys
        max(0, p - sliding_window + 1)..p; without a window, 0..p. With a soft cap, scores become
        soft_cap * tanh(score / soft_cap). With sinks [num_heads], each head has one more score, without a value.
        """
        ...

    def gate_columns(self, x: torch.Tensor, gate: torch.Tensor) -> LinearInput:
        """[T, n], [T, n] -> [T, n]: x * sigmoid(gate), for `linear` only; may be written to x.

        The gate may be columns of wider rows.
        """
        ...

    def add_shared(
        self, mixed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """[T, n], [T, n], [T, n], [n] fp32 -> [T, n]: mixed + sigmoid(x . gate) * shared, with a dot product per row.

        Adds the expert that all tokens of a mixture share (Qwen2-MoE, arXiv:2407.10671); may be written to mixed.
        """
        ...

    def delta_rule(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        metadata: AttentionMetadata,
    ) -> LinearInput:
        """Computes a gated delta rule layer between its projections; see `kernels.delta_rule`.

        Args:
            x: [T, num_channels + value_size]: queries, keys and values before the convolution, then z; may be written
                to.
            gates: [T, 2 * num_value_heads]: b, then a.
            weights: of the layer.
            states: of all requests; those of the rows are updated. A row without tokens before this step begins anew.
            metadata: rows of the batch, with `state_slots`; a row of sequence length 0 is padding.
        Returns: [T, value_size], for `linear` only; zero for rows of padding.
        """
        ...

    def gate_and_mul(self, gate_up: torch.Tensor, gate: Gate) -> LinearInput:
        """[T, 2 * n] -> [T, n], for `linear` only: f(first half) * second half (arXiv:2002.05202), or as `ClampedGate`.

        f is silu(x) = x * sigmoid(x), or gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
        (arXiv:1606.08415).
        """
        ...

    def soft_cap(self, x: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """[T, n] fp32, contiguous: soft_cap * tanh(x / soft_cap) (arXiv:2408.00118); may be written to x."""
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits [S, vocab_size] float32, by the rules of `kernels.sampling`."""
        ...

    def pack_experts(
        self,
        router: torch.Tensor | None,
        gate_up: Sequence[LinearWeights],
        down: Sequence[LinearWeights],
        routing: Routing,
        router_bias: torch.Tensor | None = None,
    ) -> Experts:
        """Lays out the router [num_experts, in] and its bias [num_experts], and the packed layers of each expert.

        Without a router, only `mix_chosen_experts` takes the result. Layers are of one shape and format, all with
        biases or all without.

        Raises: ValueError: a format that the family does not multiply by experts.
        """
        ...

    def mix_experts(self, x: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Computes a mixture of experts (arXiv:2101.03961, section 2): x [T, in] -> [T, out].

        Probabilities of experts are the softmax of the router's results, in fp32. Returns the sum of the chosen
        experts' down(gate(gate_up(x))), each times its probability, in the order of their numbers.

        Raises: ValueError: the experts have no router.
        """
        ...

    def mix_chosen_experts(self, x: torch.Tensor, experts: Experts, choice: ExpertChoice) -> torch.Tensor:
        """Computes a mixture of experts that the caller has chosen: x [T, in] -> [T, out].

        Returns the sum over j of weights[t, j] times down(gate(gate_up(x[t]))) of expert experts[t, j], in the order of
        j. A number that is not of an expert makes the row of its token NaN, and no other.

        Raises: ValueError: the choice is not of these rows, or not of `Routing.top_k` experts each.
        """
        ...


class AdapterOps(Protocol):
    """Operations of families that compute adapters of linear layers, which may be replaced between two steps."""

    def reserve_adapters(
        self, num_adapters: int, max_rank: int, in_features: int, rows: Sequence[tuple[int, int]]
    ) -> Adapters:
        """Allocates adapters of one linear layer that change nothing until `set_adapter`.

        Args:
            num_adapters: slots of adapters, all of which `add_adapters` takes.
            max_rank: most terms of a change.
            in_features: columns of the layer.
            rows: first and last row, exclusive, of each change that an adapter may have.
        """
        ...

    def set_adapter(self, adapters: Adapters, index: int, changes: Sequence[LowRank]) -> None:
        """Replaces what one adapter changes of the layer; called on any thread, while no step uses this adapter.

        Steps need not be compiled again. Allocates little besides.
        Raises: ValueError: the changes are not among those that were reserved.
        """
        ...

    def add_adapters(self, y: torch.Tensor, x: LinearInput, adapters: Adapters, tokens: AdaptedTokens) -> None:
        """Adds B (A x) to y, the results of a linear layer of inputs x, for these tokens, in place."""
        ...


def pack_adapters(ops: AdapterOps, adapters: Sequence[Sequence[LowRank]]) -> Adapters:
    """Returns adapters of one linear layer, reserved as their changes need; at least one changes some rows."""
    changes = [change for adapter in adapters for change in adapter]
    rows = sorted({(change.first_row, change.first_row + len(change.b)) for change in changes})
    max_rank = max(len(change.a) for change in changes)
    packed = ops.reserve_adapters(len(adapters), max_rank, changes[0].a.shape[1], rows)
    for index, adapter in enumerate(adapters):
        ops.set_adapter(packed, index, adapter)
    return packed
