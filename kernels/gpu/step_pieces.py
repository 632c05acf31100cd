"""CUDA graphs of steps with prompt chunks: everything but attention is recorded, in one graph between two attentions.

The launches of attention, and of the delta rule that some layers have in its place, depend on the rows of the step. All
other operations depend on the number of tokens only. So a step of 32 layers is 33 graphs and 32 calls of attention,
instead of some 300 launches.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.gpu.capture import capture
from kernels.gpu.kv_cache import GpuKVCache
from kernels.gpu.quantize import QuantizedRows, checked_group_size, empty_rows
from kernels.interface import Step
from kernels.metadata import AttentionMetadata, StepInputs


class StepPieces:
    """A recorded step of a fixed number of tokens, whose rows are those of each call."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.cuda.CUDAGraph, Callable[..., object] | None, int]] = []

    def add(self, graph: torch.cuda.CUDAGraph, attend: Callable[..., object] | None = None, group: int = 0) -> None:
        """Appends a graph, and the attention of a layer that follows it; group: of `AttentionMetadata.of_group`."""
        self._pieces.append((graph, attend, group))

    def replay(self, metadata: AttentionMetadata) -> None:
        """Runs the step; tokens that belong to no row of the metadata are padding."""
        for graph, attend, group in self._pieces:
            graph.replay()
            if attend is not None:
                attend(metadata=metadata.of_group(group))


class PieceRecorder:
    """Records steps, the largest first.

    Attention reads its queries from one buffer and writes its result to another, as the delta rule does with those of
    its own. All layers and sizes share them, because tensors that stay in use would add up in the memory pool of the
    graphs.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        """Args: pool: memory pool of the graphs. device: current device."""
        self._pool = pool
        self._device = device
        self._queries: torch.Tensor | None = None
        self._attended: torch.Tensor | None = None
        self._delta: _DeltaBuffers | None = None
        self._capture = ExitStack()
        self._graph = torch.cuda.CUDAGraph()
        self._pieces: StepPieces | None = None  # None: nothing is captured yet

    def record(self, step: Step, inputs: StepInputs) -> StepPieces:
        """Runs a step without attention, then records it. It must call the operations of this object.

        Args:
            step: writes its logits to the buffer of its inputs.
            inputs: views of the persistent buffers.
        Raises: CaptureError: it cannot be recorded; other steps may be.
        """
        self._pieces = None
        step(inputs)  # libraries choose and load their kernels for this size, which is not allowed in a capture
        torch.cuda.synchronize(self._device)
        self._pieces = pieces = StepPieces()
        with self._capture:
            self._begin()
            # with new descriptions of the batch, so that what layers share is computed in the graph too
            adapted = None if inputs.adapted is None else replace(inputs.adapted)
            step(replace(inputs, metadata=replace(inputs.metadata), adapted=adapted))
        pieces.add(self._graph)
        return pieces

    def rotate_and_store(
        self,
        rotate: Callable[..., torch.Tensor],
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: GpuKVCache,
        slot_mapping: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Calls `rotate`, which writes the queries to the buffer."""
        if self._queries is None:
            num_heads = kv_cache.num_query_heads(qkv, cos, sin)
            self._queries = qkv.new_empty(len(qkv), num_heads, kv_cache.head_dim)
        out = self._queries[: len(qkv)]
        return rotate(qkv, positions, cos, sin, kv_cache, slot_mapping, out=out, **options)

    def paged_attention(
        self,
        attend: Callable[..., torch.Tensor],
        q: torch.Tensor,
        kv_cache: GpuKVCache,
        metadata: AttentionMetadata,
        **options: Any,
    ) -> torch.Tensor:
        """Returns the buffer of the result, and divides the step: `attend` will write to it in every replay."""
        if self._attended is None:
            self._attended = q.new_zeros(len(q), q.shape[1] * kv_cache.value_dim)  # tokens of padding stay finite
        out = self._attended[: len(q)]
        self._divide(partial(attend, q, kv_cache, out=out, **options), metadata)
        return out

    def delta_rule(
        self,
        compute: Callable[..., torch.Tensor | QuantizedRows],
        x: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        states: DeltaStates,
        metadata: AttentionMetadata,
        *,
        quantize: torch.dtype | None = None,
        group_size: int | None = None,
    ) -> torch.Tensor | QuantizedRows:
        """Copies the inputs to buffers, and divides the step as `paged_attention` does."""
        if self._delta is None:
            self._delta = _DeltaBuffers.like(x, gates, weights.heads.value_size, quantize, group_size)
        x, gates = self._delta.hold(x, gates)
        out = self._delta.results(len(x))
        row_format = {"quantize": quantize, "group_size": group_size}
        self._divide(partial(compute, x, gates, weights, states, out=out, **row_format), metadata)
        return out

    def _divide(self, compute: Callable[..., object], metadata: AttentionMetadata) -> None:
        """Ends a graph and begins the next one; `compute` will be called between the two in every replay."""
        if self._pieces is not None:
            self._capture.close()
            self._pieces.add(self._graph, compute, metadata.group)
            self._begin()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._capture.enter_context(capture(self._graph, self._pool, self._device))


class _DeltaBuffers(NamedTuple):
    """Inputs and results of the delta rule, for the most tokens."""

    x: torch.Tensor
    gates: torch.Tensor
    out: torch.Tensor | QuantizedRows

    @classmethod
    def like(
        cls, x: torch.Tensor, gates: torch.Tensor, n: int, quantize: torch.dtype | None, group_size: int | None
    ) -> "_DeltaBuffers":
        """Allocates them for inputs of these shapes, and results of n values per token, which are zero."""
        out, values, scales = empty_rows(x, n, quantize, checked_group_size(n, quantize, group_size))
        values.zero_()  # until the first replay, what follows reads them
        scales.zero_()
        return cls(x.new_empty(x.shape), gates.new_empty(gates.shape), out)

    def hold(self, x: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies the inputs; returns the copies."""
        return self.x[: len(x)].copy_(x), self.gates[: len(gates)].copy_(gates)

    def results(self, num_tokens: int) -> torch.Tensor | QuantizedRows:
        """Returns the buffer of the results of a step."""
        if isinstance(self.out, QuantizedRows):
            return QuantizedRows(self.out.values[:num_tokens], self.out.scales[:num_tokens])
        return self.out[:num_tokens]
