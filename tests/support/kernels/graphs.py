"""Fake CUDA graphs on tensors of any device, for tests of the code that records and replays them.

A capture records each operation and each kernel launch without computing it, and a replay computes them again from what
their inputs hold then. Operations that wait for the device are errors in a capture. On tensors without memory a capture
records nothing.

A capture that fails leaves torch in the state of torch 2.11: unless memory ran out, its end fails too, on the capture's
stream and with an allocator that cannot empty its cache, and the pool stays reserved.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from kernels.interface import Step
from kernels.metadata import StepInputs
from tests.support.kernels.gpu_memory import FakeGpuMemory

_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class FakeGraph:
    """Has the interface of `torch.cuda.CUDAGraph`.

    Attributes:
        calls: recorded work.
        size: number of tokens, if a step begins with this graph.
    """

    def __init__(self, graphs: "FakeGraphs") -> None:
        self._graphs = graphs
        self.calls: list[Callable[[], None]] = []
        self.size: int | None = None

    @torch.inference_mode()
    def replay(self) -> None:
        """Computes what was recorded."""
        if self.size is not None:
            self._graphs.replayed.append(self.size)
        for call in self.calls:
            call()


class FakeGraphs:
    """The graphs of a fake GPU; tests replace attributes of `torch.cuda` with `patches`.

    Attributes:
        recorded: (tokens, pool) of each recorded step, in order.
        replayed: tokens of each replayed step, in order.
        memory: memory of the GPU, of which each graph takes some.
        failing: errors raised by captures of steps of these numbers of tokens, once they have begun.
        stream: the current one.
    """

    def __init__(self, memory: FakeGpuMemory | None = None, *, bytes_per_graph: int = 0) -> None:
        self.memory = memory or FakeGpuMemory()
        self._bytes_per_graph = bytes_per_graph
        self.recorded: list[tuple[int, object]] = []
        self.replayed: list[int] = []
        self._pools: list[object] = []
        self._recording: tuple[FakeGraph, object] | None = None
        self.failing: dict[int, RuntimeError] = {}
        self.stream = "steps"
        self._allocating: list[object] = []  # pools
        self._computed: set[int] = set()
        self._ready: set[int] = set()

    def patches(self) -> dict[str, object]:
        """Returns the replacements by their name in `torch.cuda`."""
        graphs = self

        class Graph(FakeGraph):  # a class, as others may use the name as a type
            def __init__(self) -> None:
                super().__init__(graphs)

        return {
            "CUDAGraph": Graph,
            "graph": self._record,
            "graph_pool_handle": self._make_pool,
            "synchronize": self._synchronize,
            **self.memory.patches(),
            "empty_cache": self._empty_cache,
            "current_stream": lambda _device: self.stream,
            "set_stream": self._set_stream,
        }

    def end_allocation(self, _device_index: int | None, pool: object) -> None:
        """Replaces `torch._C._cuda_endAllocateToPool`."""
        if pool not in self._allocating:
            raise RuntimeError("not currently recording to this pool")
        self._allocating.remove(pool)

    def recordable(self, step: Step) -> Step:
        """Wraps a step to check that it ran, and was waited for, before it is recorded."""

        def call(inputs: StepInputs) -> torch.Tensor:
            size = len(inputs.input_ids)
            if self._recording is None:
                self._computed.add(size)
                return step(inputs)
            graph, pool = self._recording
            assert size in self._ready, f"{size} tokens were not computed, and waited for, before recording"
            assert not inputs.metadata.derived, "a replay would not compute what was derived before the recording"
            graph.size = size
            logits = step(inputs)
            if size in self.failing:
                raise self.failing[size]
            self.recorded.append((size, pool))
            return logits

        return call

    def _make_pool(self) -> object:
        self._pools.append(object())
        return self._pools[-1]

    def _synchronize(self, device: torch.device) -> None:
        self._ready |= self._computed

    def _empty_cache(self) -> None:
        if self._allocating:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.memory.empty_cache()

    def _set_stream(self, stream: str) -> None:
        self.stream = stream

    @contextmanager
    def _record(self, graph: FakeGraph, pool: object) -> Iterator[None]:
        assert pool in self._pools, "the pool was not made by graph_pool_handle"
        assert self._recording is None, "two captures at a time"
        assert self.stream == "steps", "a capture would be recorded on the stream of the last one"
        self._empty_cache()
        self.memory.num_graphs[pool] += 1
        self._allocating.append(pool)
        self.stream = "capture"
        self._recording, self.memory.pool = (graph, pool), pool

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            if not any(tensor.is_meta for tensor in _tensors(args)):
                graph.calls.append(partial(run, kernel, *args, grid=grid, warmup=warmup, **options))

        run = InterpretedFunction.run
        try:
            with mock.patch.object(InterpretedFunction, "run", launch), _Capture(graph.calls):
                yield
        except torch.OutOfMemoryError:
            self._end(pool)
            raise
        except RuntimeError as error:
            raise RuntimeError("CUDA error: the capture was invalidated by a previous error\nAdvice") from error
        else:
            self._end(pool)
            self.memory.use(self._bytes_per_graph)
            weakref.finalize(graph, self._destroy, pool)
        finally:
            self._recording = self.memory.pool = None

    def _end(self, pool: object) -> None:
        self._allocating.remove(pool)
        self.stream = "steps"

    def _destroy(self, pool: object) -> None:
        self.memory.num_graphs[pool] -= 1
        self.memory.use(-self._bytes_per_graph)


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations; new floating-point results hold NaN until a replay."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in _WAITS, f"{func} waits for the device"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if any(tensor.is_meta for tensor in outputs):
            return result
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_new = [tensor.untyped_storage()._cdata not in given for tensor in outputs]
        for tensor, new in zip(outputs, is_new, strict=True):
            if new and tensor.is_floating_point() and tensor.itemsize > 1:
                tensor.fill_(torch.nan)

        def again() -> None:
            for old, tensor, new in zip(outputs, _tensors(func(*args, **kwargs)), is_new, strict=True):
                if new:
                    old.copy_(tensor)

        self._calls.append(again)
        return result


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
