"""CUDA graphs of steps with prompt chunks: everything but attention is recorded, in one graph between two attentions.

The launches of attention depend on the rows of the step. All other operations depend on the number of tokens only. So a
step of 32 layers is 33 graphs and 32 calls of attention, instead of some 300 launches.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.gpu.capture import capture
from kernels.gpu.kv_cache import GpuKVCache
from kernels.interface import Step
from kernels.metadata import AttentionMetadata, StepInputs


class StepPieces:
    """A recorded step of a fixed number of tokens, whose rows are those of each call."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.cuda.CUDAGraph, Callable[..., torch.Tensor] | None, int]] = []

    def add(
        self, graph: torch.cuda.CUDAGraph, attend: Callable[..., torch.Tensor] | None = None, group: int = 0
    ) -> None:
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

    Attention reads its queries from one buffer and writes its result to another. All layers and sizes share them,
    because tensors that stay in use would add up in the memory pool of the graphs.
    """

    def __init__(self, pool: Any, device: torch.device) -> None:
        """Args: pool: memory pool of the graphs. device: current device."""
        self._pool = pool
        self._device = device
        self._queries: torch.Tensor | None = None
        self._attended: torch.Tensor | None = None
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
        """Ends a graph and begins the next one; `attend` will be called between the two in every replay."""
        if self._attended is None:
            self._attended = q.new_zeros(len(q), q.shape[1] * q.shape[2])  # tokens of padding stay finite
        out = self._attended[: len(q)]
        if self._pieces is not None:
            self._capture.close()
            self._pieces.add(self._graph, partial(attend, q, kv_cache, out=out, **options), metadata.group)
            self._begin()
        return out

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._capture.enter_context(capture(self._graph, self._pool, self._device))
