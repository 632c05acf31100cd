"""`KernelOps` optimised for CPUs: products in fp32, bf16 or int8, fp32 everywhere else.

Weights of products in fp32 may be stored in two bytes.

Each operation is an instruction of a program. An operation called alone is recorded and run at once. `compile_step`
records a whole step, whose replay is one call.
"""

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from kernels.cpu.adapters import PackedAdapters, emit_add_adapters, reserve_adapters, set_adapter
from kernels.cpu.compilers import compiling_elsewhere
from kernels.cpu.delta_rule import emit_delta_rule
from kernels.cpu.experts import (
    PackedExperts,
    Routed,
    emit_choice,
    emit_combine,
    emit_expert_linear,
    emit_route,
    pack_experts,
)
from kernels.cpu.gather_rows import can_gather, emit_gather_rows
from kernels.cpu.jit import num_kernels, watch_compiles
from kernels.cpu.kv_cache import CpuKVCache, make_kv_cache
from kernels.cpu.linear import emit_linear
from kernels.cpu.pack_grouped import pack_fp4, pack_grouped
from kernels.cpu.packed_linear import PackedLinear, pack_linear
from kernels.cpu.paged_attention import emit_paged_attention, emit_plan
from kernels.cpu.pointwise import (
    emit_add_rms_norm,
    emit_add_shared,
    emit_gate_and_mul,
    emit_gate_columns,
    emit_norm_columns,
    emit_rms_norm,
    emit_soft_cap,
)
from kernels.cpu.recording import Recording
from kernels.cpu.rotate_and_store import emit_rotate_and_store
from kernels.cpu.sample import Sampler, compile_sampler
from kernels.cpu.worker_pool import Program, WorkerPool
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.fp8_weights import dequantized
from kernels.gates import Gate
from kernels.grouped_weights import GroupedWeights
from kernels.interface import ExpertChoice, LowRank, Quantization, Routing, Step
from kernels.metadata import AdaptedTokens, AttentionMetadata, StepInputs
from kernels.microscaled_weights import Fp4Weights, MicroscaledWeights
from kernels.sampling import SampledTokens, SamplingBatch

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CpuOps:
    """Implements `kernels.interface.KernelOps`. One thread may use it at a time."""

    name = "cpu"

    def __init__(
        self,
        *,
        quantization: Quantization | None = None,
        multiplies_in_bf16: bool = False,
        num_threads: int = 1,
        on_compiled: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._quantize = quantization == "int8"
        self._multiplies_in_bf16 = multiplies_in_bf16
        total = num_kernels()
        with (
            compiling_elsewhere(min(2, num_threads), lambda done: on_compiled(min(done, total), total)),
            watch_compiles(on_compiled),
        ):
            self._pool = WorkerPool(num_threads)
            compile_sampler()
        self._step: Recording | None = None  # the step being recorded, if any
        self._sampler = Sampler()
        self._num_samplings = 0
        self._drawn = np.zeros(0, dtype=np.int64)  # token ids of the last sampling
        self._plans: dict[int, torch.Tensor] = {}  # of the recorded step, by query heads per KV head

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None, *, for_logits: bool = False) -> PackedLinear:
        """Lays weights out in panels, in their dtype or in int8, which is precise enough for the output head too."""
        return pack_linear(weight, bias, quantize=self._quantize, multiplies_in_bf16=self._multiplies_in_bf16)

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """Dequantizes the weights and packs them as `pack_linear` does."""
        return self.pack_linear(dequantized(values, scales).to(dtype), bias)

    def pack_grouped(self, weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """Packs the weights as they are; with int8 requested, inputs are quantised."""
        return pack_grouped(weights, bias, quantize=self._quantize)

    def pack_microscaled(
        self, weights: MicroscaledWeights, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """Packs as `pack_fp4` does."""
        return self.pack_fp4(weights, bias, dtype)

    def pack_fp4(self, weights: Fp4Weights, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """Packs the codes as they are; with int8 requested, quantises the weights again."""
        if self._quantize:
            return self.pack_linear(weights.dequantized(torch.float32), bias)
        return pack_fp4(weights, bias)

    def make_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        value_dim: int | None = None,
    ) -> CpuKVCache:
        """Allocates keys and values of one layer, float32, bfloat16 or int8.

        Raises: ValueError: values are to be part of the keys, which have another layout.
        """
        if value_dim is not None:
            raise ValueError(f"value_dim is {value_dim}: CPU operations store values")
        return make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def compile_step(
        self,
        step: Step,
        largest: StepInputs,
        decode_sizes: Sequence[int] = (),
        mixed_sizes: Sequence[int] = (),
        mixes_torch: bool = False,
        yields_logits: bool = True,
    ) -> Step:
        """Records the step at the size of its largest inputs; the result replays it at any size.

        A program has no operations of torch: a step that has some is returned as it is.
        """
        if mixes_torch:
            return step
        counts = torch.zeros(4, 1, dtype=torch.int64)
        num_tokens, num_reqs, num_logits, num_adapted = counts
        numbers = counts.flatten().numpy()
        metadata = largest.metadata
        recording = Recording(self._pool.num_threads)
        slot_mappings = (metadata.slot_mapping, *(blocks.slot_mapping for blocks in metadata.other_groups))
        for tensor in (largest.input_ids, largest.positions, *slot_mappings):
            recording.add_input(tensor, num_tokens)
        recording.add_input(metadata.seq_lens, num_reqs)
        recording.add_input(largest.logits_indices, num_logits)
        if largest.adapted is not None:
            recording.add_input(largest.adapted.indices, num_adapted)
        if largest.residual is not None:
            recording.add_input(largest.residual, num_tokens)
        result, program = self._record(recording, lambda: step(largest))
        num_rows = recording.row_count(result)
        recording.keep(metadata)

        def replay(inputs: StepInputs) -> torch.Tensor:
            num_logits = inputs.logits_indices.shape[0]
            num_adapted = 0 if inputs.adapted is None else inputs.adapted.indices.shape[0]
            numbers[:] = inputs.input_ids.shape[0], inputs.metadata.num_reqs, num_logits, num_adapted
            self._pool.run(program)
            return result[: int(num_rows)]

        return replay

    def replayable(self, operations: Callable[[], _T]) -> Callable[[], _T]:
        """Records operations of fixed sizes as one call that updates and returns their results. For benchmarks."""
        result, program = self._record(Recording(self._pool.num_threads), operations)

        def replay() -> _T:
            self._pool.run(program)
            return result

        return replay

    def _record(self, recording: Recording, operations: Callable[[], _T]) -> tuple[_T, Program]:
        self._step, self._plans = recording, {}
        try:
            return operations(), Program(recording)
        finally:
            self._step = None

    def pack_table(self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype) -> torch.Tensor | PackedLinear:
        """Returns a dense matrix as it is; integers in groups become the panels of a linear layer."""
        if isinstance(matrix, torch.Tensor):
            return matrix
        packed = pack_grouped(matrix, None, quantize=False)
        return packed if can_gather(packed) else matrix.dequantized(dtype)

    def pack_tied(
        self, matrix: torch.Tensor | GroupedWeights, dtype: torch.dtype
    ) -> tuple[torch.Tensor | PackedLinear, PackedLinear]:
        """Packs the head; rows are gathered from its panels, or from a table of their own if the head is in int8."""
        if isinstance(matrix, torch.Tensor):
            head = self.pack_linear(matrix, None, for_logits=True)
        else:
            head = self.pack_grouped(matrix, None, dtype)
        return (head if can_gather(head) else self.pack_table(matrix, dtype)), head

    def gather_rows(self, table: torch.Tensor | PackedLinear, indices: torch.Tensor) -> torch.Tensor:
        """Indexes the table; the result is fp32."""
        return self._emit(emit_gather_rows, table, indices)

    def linear(self, x: torch.Tensor, weights: PackedLinear) -> torch.Tensor:
        """Multiplies by the weight matrix and adds the bias."""
        return self._emit(emit_linear, x, weights)

    def reserve_adapters(
        self, num_adapters: int, max_rank: int, in_features: int, rows: Sequence[tuple[int, int]]
    ) -> PackedAdapters:
        """Allocates panels, in fp32 beside weights of any type, and tables that steps read when they run."""
        return reserve_adapters(num_adapters, max_rank, in_features, rows)

    def set_adapter(self, adapters: PackedAdapters, index: int, changes: Sequence[LowRank]) -> None:
        """Writes the panels, then the tables."""
        set_adapter(adapters, index, changes)

    def add_adapters(self, y: torch.Tensor, x: torch.Tensor, adapters: PackedAdapters, tokens: AdaptedTokens) -> None:
        """Adds B (A x) to the rows of these tokens."""
        self._emit(emit_add_adapters, y, x, adapters, tokens)

    def pack_experts(
        self,
        router: torch.Tensor | None,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        routing: Routing,
        router_bias: torch.Tensor | None = None,
    ) -> PackedExperts:
        """Packs the router in its own dtype, which is never quantised."""
        return pack_experts(router, gate_up, down, routing, router_bias)

    def mix_experts(self, x: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
        """Computes the experts that the router chooses for each token."""
        router = experts.router
        if router is None:
            raise ValueError("the experts have no router")

        def emit(recording: Recording) -> torch.Tensor:
            routed = emit_route(recording, emit_linear(recording, x, router), experts.routing)
            return _emit_mixture(recording, x, experts, routed)

        return self._emit(emit)

    def mix_chosen_experts(self, x: torch.Tensor, experts: PackedExperts, choice: ExpertChoice) -> torch.Tensor:
        """Computes the experts that the caller has chosen for each token; a recorded step reads them at each replay."""

        def emit(recording: Recording) -> torch.Tensor:
            return _emit_mixture(recording, x, experts, emit_choice(recording, x, choice, experts))

        return self._emit(emit)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False) -> torch.Tensor:
        """Norms over the last dimension; returns a tensor in either case."""
        return self._emit(emit_rms_norm, x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, for_linear: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (rms_norm(x + residual), x + residual), tensors in either case."""
        return self._emit(emit_add_rms_norm, x, residual, weight, eps)

    def norm_columns(self, x: torch.Tensor, first: int, weight: torch.Tensor, eps: float) -> None:
        """Norms the columns in place."""
        self._emit(emit_norm_columns, x, first, weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: CpuKVCache,
        slot_mapping: torch.Tensor,
        *,
        head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Rotates queries and keys, writes keys and values to the cache and returns the queries."""
        return self._emit(emit_rotate_and_store, qkv, positions, cos, sin, kv_cache, slot_mapping, head_norms, eps)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: CpuKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes causal attention of a ragged batch over a paged cache."""
        plans = self._plans if self._step else {}
        group_size = q.shape[1] // kv_cache.num_kv_heads

        def emit(recording: Recording) -> torch.Tensor:
            if group_size not in plans:
                plans[group_size] = emit_plan(recording, metadata, group_size)
            return emit_paged_attention(
                recording,
                q,
                kv_cache,
                metadata,
                plans[group_size],
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                sinks=sinks,
            )

        return self._emit(emit)

    def gate_columns(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Computes x * sigmoid(gate) in place."""
        return self._emit(emit_gate_columns, x, gate)

    def add_shared(
        self, mixed: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """Adds sigmoid(x . gate) * shared to mixed, in place."""
        return self._emit(emit_add_shared, mixed, shared, x, gate)

    def delta_rule(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Takes the tokens of each row through the layer, and keeps its state."""
        return self._emit(emit_delta_rule, x, gates, weights, states, metadata)

    def gate_and_mul(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Gates the second half by the first one."""
        return self._emit(emit_gate_and_mul, gate_up, gate)

    def soft_cap(self, x: torch.Tensor, soft_cap: float) -> torch.Tensor:
        """Computes soft_cap * tanh(x / soft_cap) in place."""
        return self._emit(emit_soft_cap, x, soft_cap)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits."""
        return self._sampler.sample(logits, batch, self._show)

    def progress(self) -> tuple[int, ...]:
        """Returns counters that change with every item of a program and every sampled row.

        Any thread may read them at any time, without blocking a step.
        """
        return *self._pool.progress(), self._num_samplings, int(np.count_nonzero(self._drawn >= 0))

    def _show(self, token_ids: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        self._drawn = token_ids
        self._num_samplings += 1

    def _emit(self, emit: Callable[Concatenate[Recording, _P], _T], *operands: _P.args, **options: _P.kwargs) -> _T:
        """Adds an operation to the step being recorded; outside of a recording, runs it at once."""
        if self._step is not None:
            return emit(self._step, *operands, **options)
        recording = Recording(self._pool.num_threads)
        result = emit(recording, *operands, **options)
        self._pool.run(Program(recording))
        return result


def _emit_mixture(recording: Recording, x: torch.Tensor, experts: PackedExperts, routed: Routed) -> torch.Tensor:
    """Emits the experts of the rows x [T, in], and their weighted sum."""
    gate_up = emit_expert_linear(recording, x, experts.gate_up, routed, is_of_tokens=True)
    gated = emit_gate_and_mul(recording, gate_up, experts.routing.gate)
    results = emit_expert_linear(recording, gated, experts.down, routed, is_of_tokens=False)
    return emit_combine(recording, results, routed)
