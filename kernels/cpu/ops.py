"""`KernelOps` made to be fast on CPUs: fp32 or int8 products, fp32 everywhere else.

Each operation is an instruction of a program. Called one by one they are recorded and run at once; between the
recording of `compile_step` and its replays a whole step becomes one call.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from kernels.cpu.jit import watch_compiles
from kernels.cpu.kv_cache import CpuKVCache, make_kv_cache
from kernels.cpu.linear import PackedLinear, emit_linear, pack_linear
from kernels.cpu.paged_attention import emit_paged_attention, emit_plan
from kernels.cpu.pointwise import emit_add_rms_norm, emit_gather_rows, emit_rms_norm, emit_silu_and_mul
from kernels.cpu.recording import Recording
from kernels.cpu.rotate_and_store import emit_rotate_and_store
from kernels.cpu.sample import compile_sampler, sample
from kernels.cpu.worker_pool import Program, WorkerPool
from kernels.interface import Quantization, Step
from kernels.metadata import AttentionMetadata, StepInputs
from kernels.sampling import SampledTokens, SamplingBatch

_T = TypeVar("_T")


class CpuOps:
    """Contracts are those of `kernels.interface.KernelOps`. One thread may use it at a time."""

    name = "cpu"

    def __init__(
        self,
        *,
        quantization: Quantization | None = None,
        num_threads: int = 1,
        on_compiled: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._quantize = quantization == "int8"
        with watch_compiles(on_compiled):
            self._pool = WorkerPool(num_threads)
            compile_sampler()
        self._step: Recording | None = None  # while one is recorded
        self._num_samplings = 0
        self._drawn = np.zeros(0, dtype=np.int64)  # by the latest
        self._plans: dict[int, torch.Tensor] = {}  # of the step, by query heads per KV head

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        for_logits: bool = False,  # noqa: ARG002 - int8 weights are precise enough for all layers
    ) -> PackedLinear:
        """Weights in panels; int8 if asked for."""
        return pack_linear(weight, bias, quantize=self._quantize)

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """Weights as they are meant, in panels; int8 if asked for."""
        return self.pack_linear((values.float() * scales.float().reshape(-1, 1)).to(dtype), bias)

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> CpuKVCache:
        """Keys and values of one layer, float32 or int8."""
        return make_kv_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def compile_step(self, step: Step, largest: StepInputs, decode_sizes: Sequence[int] = ()) -> Step:  # noqa: ARG002
        """Records the step at the size of its largest inputs; what it returns replays it at any."""
        num_tokens, num_reqs, num_logits = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
        metadata = largest.metadata
        recording = Recording(self._pool.num_threads)
        for tensor in (largest.input_ids, largest.positions, metadata.slot_mapping):
            recording.add_input(tensor, num_tokens)
        recording.add_input(metadata.seq_lens, num_reqs)
        recording.add_input(largest.logits_indices, num_logits)
        logits, program = self._record(recording, lambda: step(largest))
        recording.keep(metadata)

        def replay(inputs: StepInputs) -> torch.Tensor:
            num_tokens[0], num_reqs[0] = inputs.input_ids.shape[0], inputs.metadata.num_reqs
            num_logits[0] = inputs.logits_indices.shape[0]
            self._pool.run(program)
            return logits[: inputs.logits_indices.shape[0]]

        return replay

    def replayable(self, operations: Callable[[], _T]) -> Callable[[], _T]:
        """Operations of fixed sizes as one call, which returns what they returned, with new values: for benchmarks."""
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

    def gather_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of a table."""
        recording = self._recording()
        return self._done(recording, emit_gather_rows(recording, table, indices))

    def linear(self, x: torch.Tensor, weights: PackedLinear) -> torch.Tensor:
        """[T, in] @ weight [out, in]^T + bias [out] -> [T, out]."""
        recording = self._recording()
        return self._done(recording, emit_linear(recording, x, weights))

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        for_linear: bool = False,  # noqa: ARG002 - `linear` takes tensors
    ) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        recording = self._recording()
        return self._done(recording, emit_rms_norm(recording, x, weight, eps))

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        for_linear: bool = False,  # noqa: ARG002 - `linear` takes tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        recording = self._recording()
        normed, total = emit_add_rms_norm(recording, x, residual, weight, eps)
        return self._done(recording, normed), total

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
        """Rotated queries; keys and values go to the cache."""
        recording = self._recording()
        q = emit_rotate_and_store(recording, qkv, positions, cos, sin, kv_cache, slot_mapping, head_norms, eps)
        return self._done(recording, q)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: CpuKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of a ragged batch over a paged cache."""
        if soft_cap is not None:
            raise ValueError(f"soft cap of attention scores is {soft_cap}; the CPU operations have none")
        recording = self._recording()
        plans = self._plans if self._step else {}
        group_size = q.shape[1] // kv_cache.num_kv_heads
        if group_size not in plans:
            plans[group_size] = emit_plan(recording, metadata, group_size)
        out = emit_paged_attention(
            recording, q, kv_cache, metadata, plans[group_size], scale=scale, sliding_window=sliding_window
        )
        return self._done(recording, out)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        recording = self._recording()
        return self._done(recording, emit_silu_and_mul(recording, gate_up))

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits."""
        return sample(logits, batch, self._show)

    def progress(self) -> tuple[int, ...]:
        """Changes while a step gets on: with every item of a program and every row that is sampled. May be read by any
        thread at any time, and stops nobody.
        """
        return *self._pool.progress(), self._num_samplings, int(np.count_nonzero(self._drawn >= 0))

    def _show(self, token_ids: "np.ndarray[Any, np.dtype[np.int64]]") -> None:
        self._drawn = token_ids
        self._num_samplings += 1

    def _recording(self) -> Recording:
        """Of the step that is being recorded, or of one operation."""
        return self._step or Recording(self._pool.num_threads)

    def _done(self, recording: Recording, result: torch.Tensor) -> torch.Tensor:
        """Runs what is not part of a step at once."""
        if recording is not self._step:
            self._pool.run(Program(recording))
        return result
