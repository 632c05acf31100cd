"""Fake CUDA graphs on tensors of any device, for tests of the code that records and replays them.

They are stricter than a GPU: replaying any graph overwrites the results of all others, as graphs share memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from kernels.interface import Step
from kernels.metadata import StepInputs


class FakeGraph:
    """Has the interface of `torch.cuda.CUDAGraph`."""

    def __init__(self, graphs: "FakeGraphs") -> None:
        self._graphs = graphs
        self.recorded: tuple[Step, StepInputs, torch.Tensor] | None = None

    def replay(self) -> None:
        """Computes the step again, from what its inputs hold now, into the tensor that recording returned."""
        assert self.recorded is not None, "nothing was recorded"
        self._graphs.forget_outputs()
        step, inputs, logits = self.recorded
        # a replay computes again what the layers share
        logits.copy_(step(replace(inputs, metadata=replace(inputs.metadata))))
        self._graphs.replayed.append(inputs.metadata.num_reqs)


class FakeGraphs:
    """The memory and graphs of a fake GPU; tests replace attributes of `torch.cuda` with `patches`.

    Attributes:
        made: the graphs.
        recorded: (rows, pool) of each graph, in order.
        replayed: rows of each replay, in order.
    """

    def __init__(self, free_bytes: Sequence[int] = ()) -> None:
        """free_bytes: successive results of `mem_get_info`; the last one, or 0, is repeated."""
        self.recorded: list[tuple[int, object]] = []
        self.replayed: list[int] = []
        self._free_bytes = list(free_bytes) or [0]
        self._pools: list[object] = []
        self.made: list[FakeGraph] = []
        self._recording: tuple[FakeGraph, object] | None = None
        self._computed: set[int] = set()
        self._ready: set[int] = set()

    def patches(self) -> dict[str, object]:
        """Returns the replacements by their name in `torch.cuda`."""
        graphs = self

        class Graph(FakeGraph):  # a class, as others may use the name as a type
            def __init__(self) -> None:
                super().__init__(graphs)
                graphs.made.append(self)

        return {
            "CUDAGraph": Graph,
            "graph": self._record,
            "graph_pool_handle": self._make_pool,
            "mem_get_info": self._memory,
            "synchronize": self._synchronize,
        }

    def recordable(self, step: Step) -> Step:
        """Wraps a step so that it computes nothing while a graph is recorded, and checks that it ran before."""

        def call(inputs: StepInputs) -> torch.Tensor:
            if self._recording is None:
                self._computed.add(inputs.metadata.num_reqs)
                return step(inputs)
            graph, pool = self._recording
            num_reqs = inputs.metadata.num_reqs
            assert num_reqs in self._ready, f"{num_reqs} rows were not computed, and waited for, before recording"
            assert not inputs.metadata.derived, "a replay would not compute what was derived before the recording"
            logits = torch.full_like(step(inputs), torch.nan)
            graph.recorded = (step, inputs, logits)
            self.recorded.append((num_reqs, pool))
            return logits

        return call

    def forget_outputs(self) -> None:
        """Overwrites the results of all graphs with NaN."""
        for graph in self.made:
            if graph.recorded is not None:
                graph.recorded[2].fill_(torch.nan)

    def _make_pool(self) -> object:
        self._pools.append(object())
        return self._pools[-1]

    def _memory(self, device: torch.device) -> tuple[int, int]:
        return (self._free_bytes.pop(0) if len(self._free_bytes) > 1 else self._free_bytes[0]), 1 << 40

    def _synchronize(self, device: torch.device) -> None:
        self._ready |= self._computed

    @contextmanager
    def _record(self, graph: FakeGraph, pool: object) -> Iterator[None]:
        assert pool in self._pools, "the pool was not made by graph_pool_handle"
        self._recording = graph, pool
        yield
        self._recording = None
        assert graph.recorded is not None, "nothing was recorded"
