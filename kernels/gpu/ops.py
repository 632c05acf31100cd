"""`KernelOps` in Triton; matrix products by the vendor's library."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypedDict

import torch

from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.fp8_weights import has_block_scales
from kernels.gates import Gate
from kernels.gpu.adapters import PackedAdapters, add_adapters, reserve_adapters, set_adapter
from kernels.gpu.attention_backends import Attention
from kernels.gpu.block_scales import BlockScaledLinear, pack_block_scaled
from kernels.gpu.delta_rule import delta_rule
from kernels.gpu.experts import PackedExperts, mix_chosen_experts, mix_experts, pack_experts
from kernels.gpu.gate import gate_and_mul, gate_columns
from kernels.gpu.grouped_linear import GroupedLinear, grouped_span, pack_grouped
from kernels.gpu.kernel_cache import use_kernel_cache
from kernels.gpu.kv_cache import GpuKVCache, make_kv_cache
from kernels.gpu.launch import compile_only, is_compile_only, load_kernels
from kernels.gpu.linear import PackedLinear, linear, pack_linear, pack_quantized
from kernels.gpu.memory import free_bytes
from kernels.gpu.microscaled_experts import MicroscaledLinear, pack_microscaled
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.progress import Progress, no_progress
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.rms_norm import add_rms_norm, norm_columns, rms_norm
from kernels.gpu.rotate_and_store import rotate_and_store
from kernels.gpu.sample import sample
from kernels.gpu.shared_expert import add_shared
from kernels.gpu.soft_cap import soft_cap
from kernels.gpu.step_graphs import StepGraphs, UnrecordedSize, decode_inputs
from kernels.gpu.step_pieces import PieceRecorder
from kernels.gpu.targets import Target
from kernels.gpu.tiled_linear import TiledLinear, is_tiled, tiled_linear
from kernels.grouped_weights import GroupedWeights
from kernels.interface import ExpertChoice, Routing, Step
from kernels.metadata import AdaptedTokens, AttentionMetadata, StepInputs
from kernels.microscaled_weights import Fp4Weights, MicroscaledWeights
from kernels.sampling import greedy_batch


class _RowFormat(TypedDict, total=False):
    quantize: torch.dtype | None
    group_size: int | None


class GpuOps:
    """One GPU's operations; they run on the current stream.

    Attributes:
        graphs_bytes: memory that the CUDA graphs of the last compiled step took, with their logits.
        unrecorded: its sizes that run eagerly because their capture failed.
    """

    name = "triton"

    soft_cap = staticmethod(soft_cap)
    norm_columns = staticmethod(norm_columns)
    add_shared = staticmethod(add_shared)
    set_adapter = staticmethod(set_adapter)

    def __init__(
        self,
        device: torch.device,
        target: Target,
        *,
        num_processors: int,
        quantize_weights: bool = False,
        quantize_inputs: bool = False,
        input_group_size: int | None = None,
        batch_invariant: bool = False,
        attention: Attention | None = None,
        adapter_dtype: torch.dtype = torch.float32,
        progress: Progress = no_progress,
    ) -> None:
        """Compiles and allocates nothing yet.

        Args:
            device: device of the tensors.
            target: its architecture.
            num_processors: multiprocessors, which decide the number of parts of split rows.
            quantize_weights: quantises weights of linear layers to 8 bits when they are packed.
            quantize_inputs: quantises inputs of linear layers in the operation that produces them; for models with
                8-bit weights, from the checkpoint or from quantize_weights.
            input_group_size: number of adjacent quantised inputs that share a scale; None: all inputs of a token.
            batch_invariant: a token's results are the same bits in any batch; 8-bit weights with scales per channel
                need a target with `kernels.gpu.tiles.scaled_product_tiles`.
            attention: used instead of the Triton kernels of attention.
            adapter_dtype: dtype of the matrices of adapters, which must be that of activations.
            progress: shows progress of compiling kernels and recording CUDA graphs.
        Raises: UnsupportedTargetError: the target has no 8-bit floats.
        """
        use_kernel_cache()
        self._device = device
        self._target = target
        self._quantize_weights = quantize_weights
        self._row_dtype = target.require_fp8("--quantization fp8") if quantize_weights or quantize_inputs else None
        self._input_group_size = input_group_size
        self._batch_invariant = batch_invariant
        self._adapter_dtype = adapter_dtype
        self._progress = progress
        self.graphs_bytes = 0
        self.unrecorded: Sequence[UnrecordedSize] = ()
        # operations that are the functions of their modules
        self.rotate_and_store: Callable[..., torch.Tensor] = partial(rotate_and_store, target=target)
        self._tiled_linear = partial(
            tiled_linear, target=target, num_processors=num_processors, batch_invariant=batch_invariant
        )
        self._add_adapters = partial(
            add_adapters, target=target, num_processors=num_processors, batch_invariant=batch_invariant
        )
        self._triton_attention = partial(
            paged_attention, target=target, num_processors=num_processors, batch_invariant=batch_invariant
        )
        self._attention: Callable[..., torch.Tensor] = attention or self._triton_attention
        self._delta_rule: Callable[..., torch.Tensor | QuantizedRows] = delta_rule
        self.sample = partial(sample, target=target, num_processors=num_processors)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, for_logits: bool = False) -> PackedLinear:
        """Packs weights unchanged, or in 8-bit floats with a scale per output channel; never quantises the head."""
        quantizes = self._quantize_weights and not for_logits
        return pack_linear(weight, bias, quantization="fp8" if quantizes else None, target=self._target)

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear | BlockScaledLinear:
        """Packs the 8-bit weights of a checkpoint as they are stored."""
        if has_block_scales(values, scales):
            return pack_block_scaled(values, scales, bias, dtype=dtype, target=self._target)
        return pack_quantized(values, scales, bias, dtype=dtype, target=self._target)

    def pack_grouped(
        self, weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear | GroupedLinear:
        """Packs the integers in 4 or 8 bits, or dequantized if their groups are too small for a product."""
        weights = weights._replace(num_bits=4 if weights.num_bits == 4 else 8)
        span = grouped_span(weights.values.shape[1], weights.group_size, weights.num_bits)
        if span is None:
            return pack_linear(weights.dequantized(dtype), bias, quantization=None, target=self._target)
        return pack_grouped(weights, bias, dtype, span)

    def pack_microscaled(
        self, weights: MicroscaledWeights, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> MicroscaledLinear:
        """Packs the codes as they are, for experts only."""
        return pack_microscaled(weights, bias, dtype)

    def pack_fp4(
        self, weights: Fp4Weights, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear | GroupedLinear:
        """Packs twice the values of the codes, which are integers, in 8 bits."""
        return self.pack_grouped(weights.grouped(), bias, dtype)

    def make_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> GpuKVCache:
        """Allocates keys and values of one layer: 16 or 32 bits, or 8-bit floats with a scale per token and head."""
        return make_kv_cache(
            num_blocks, block_size, num_kv_heads, head_dim, dtype, value_dim, device=self._device, target=self._target
        )

    def compile_step(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        mixes_torch: bool = False,  # noqa: ARG002 - they are recorded too
        yields_logits: bool = True,
    ) -> Step:
        """Compiles every kernel that a step or the sampler can launch, then records steps as CUDA graphs."""
        with compile_only(progress=self._progress) as kernels:
            logits = step(decode_inputs(largest, 1, is_adapted=largest.adapted is not None))
            if yields_logits:
                self.sample(logits, greedy_batch(logits.shape[0], self._device, max_top_logprobs=0))
        load_kernels(kernels)
        self.graphs_bytes, self.unrecorded = 0, ()
        if not decode_sizes and not mixed_sizes:
            return step
        free_before = free_bytes(self._device)
        buffer = torch.empty(largest.logits_indices.shape[0], logits.shape[1], dtype=torch.float32, device=self._device)
        largest = replace(largest, logits=buffer)
        graphs = StepGraphs(step, largest, decode_sizes, mixed_sizes, self._recorded_by, self._progress)
        self.graphs_bytes = max(0, free_before - free_bytes(self._device))
        self.unrecorded = graphs.unrecorded
        return graphs

    @contextmanager
    def _recorded_by(self, recorder: PieceRecorder) -> Iterator[None]:
        """Passes calls of attention and what takes its place, and of what makes its queries, through the recorder."""
        rotate, attend, delta_rule = self.rotate_and_store, self._attention, self._delta_rule
        self.rotate_and_store = partial(recorder.rotate_and_store, rotate)
        self._attention = partial(recorder.paged_attention, attend)
        self._delta_rule = partial(recorder.delta_rule, delta_rule)
        try:
            yield
        finally:
            self.rotate_and_store, self._attention, self._delta_rule = rotate, attend, delta_rule

    def pack_table(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> torch.Tensor:
        """Returns the dequantized matrix."""
        return matrix if isinstance(matrix, torch.Tensor) else matrix.dequantized(dtype)

    def pack_tied(
        self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype
    ) -> tuple[torch.Tensor, PackedLinear | GroupedLinear]:
        """Returns a dense matrix for both uses; integers stay so in the head only."""
        if isinstance(matrix, torch.Tensor):
            return matrix, self.pack_linear(matrix, None, for_logits=True)
        return self.pack_table(matrix, dtype), self.pack_grouped(matrix, None, dtype)

    def gather_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Indexes the table."""
        return table.index_select(0, indices)

    def linear(self, x: torch.Tensor | QuantizedRows, packed: TiledLinear) -> torch.Tensor:
        """Multiplies by the vendor's library, or by `tiled_linear` where that is faster or the only one."""
        num_rows = (x.values if isinstance(x, QuantizedRows) else x).shape[0]
        if self._batch_invariant or is_tiled(num_rows, packed, self._target):
            return self._tiled_linear(x, packed)
        assert isinstance(packed, PackedLinear)
        if is_compile_only() and is_tiled(1, packed, self._target):
            self._tiled_linear(x, packed)  # other steps have fewer rows
        return linear(x, packed)

    def reserve_adapters(
        self, num_adapters: int, max_rank: int, in_features: int, rows: Sequence[tuple[int, int]]
    ) -> PackedAdapters:
        """Allocates slots in the dtype of the model, in one tensor for A and one for B, also for recorded steps."""
        return reserve_adapters(
            num_adapters, max_rank, in_features, rows, self._adapter_dtype, self._device, self._target
        )

    def add_adapters(
        self, y: torch.Tensor, x: torch.Tensor | QuantizedRows, adapters: PackedAdapters, tokens: AdaptedTokens
    ) -> None:
        """Adds B (A x) to the rows of these tokens; of quantised rows x has the values that they stand for."""
        if len(tokens.indices):
            rows = x.dequantized(y.dtype) if isinstance(x, QuantizedRows) else x
            self._add_adapters(y, rows, adapters, tokens)

    def pack_experts(
        self,
        router: torch.Tensor | None,
        gate_up: Sequence[TiledLinear | MicroscaledLinear],
        down: Sequence[TiledLinear | MicroscaledLinear],
        routing: Routing,
        router_bias: torch.Tensor | None = None,
    ) -> PackedExperts:
        """Copies the experts into one tensor per layer."""
        return pack_experts(router, gate_up, down, routing, router_bias)

    def mix_experts(self, x: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
        """Computes the experts that the router chooses for each token."""
        return mix_experts(
            x,
            experts,
            linear=self.linear,
            gate=partial(self.gate_and_mul, gate=experts.routing.gate),
            target=self._target,
            batch_invariant=self._batch_invariant,
        )

    def mix_chosen_experts(self, x: torch.Tensor, experts: PackedExperts, choice: ExpertChoice) -> torch.Tensor:
        """Computes the experts that the caller has chosen for each token, without waiting for the choice."""
        return mix_chosen_experts(
            x,
            experts,
            choice,
            gate=partial(self.gate_and_mul, gate=experts.routing.gate),
            target=self._target,
            batch_invariant=self._batch_invariant,
        )

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: GpuKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends by Triton kernels or another library."""
        if self._attention is not self._triton_attention and is_compile_only():  # batches have no content
            return q.new_empty(q.shape[0], q.shape[1] * kv_cache.value_dim)
        return self._attention(
            q, kv_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks
        )

    def gate_columns(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor | QuantizedRows:
        """Computes x * sigmoid(gate), quantised for 8-bit layers."""
        return gate_columns(x, gate, **self._row_format(x.shape[1]))

    def delta_rule(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        metadata: AttentionMetadata,
    ) -> torch.Tensor | QuantizedRows:
        """Computes a gated delta rule layer, quantised for 8-bit layers."""
        row_format = self._row_format(weights.heads.value_size)
        if is_compile_only():  # recorded steps copy columns of wider rows
            whole = x.new_empty(x.shape), gates.new_empty(gates.shape)
            self._delta_rule(*whole, weights, states, metadata, **row_format)
        return self._delta_rule(x, gates, weights, states, metadata, **row_format)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False
    ) -> torch.Tensor | QuantizedRows:
        """Norms over the last dimension; quantises the result for 8-bit layers."""
        return rms_norm(x, weight, eps, **self._row_format(x.shape[1]) if for_linear else {})

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False
    ) -> tuple[torch.Tensor | QuantizedRows, torch.Tensor]:
        """Returns (rms_norm(x + residual), x + residual), the former quantised for 8-bit layers."""
        return add_rms_norm(x, residual, weight, eps, **self._row_format(x.shape[1]) if for_linear else {})

    def gate_and_mul(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor | QuantizedRows:
        """Gates the second half by the first one, quantised for 8-bit layers."""
        return gate_and_mul(gate_up, gate, **self._row_format(gate_up.shape[1] // 2))

    def _row_format(self, n: int) -> _RowFormat:
        """Returns how inputs of linear layers are quantised: not at all if groups do not divide them.

        Layers with scales per block do not take such inputs; others of the same model may.
        """
        group_size = self._input_group_size
        divides = group_size is None or n % group_size == 0
        return {"quantize": self._row_dtype if divides else None, "group_size": group_size}
