"""Times calls on a device: CUDA graphs with events on a GPU, the clock on a CPU; medians.

A graph of many calls excludes the launch overhead of the host. Calls use different inputs, together larger than the L2
cache, so that the cache holds no more than in a model.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

Call = Callable[[], object]

_GRAPH_S = 2e-3  # duration of a graph; events are exact to a microsecond
_MOST_CALLS = 512  # in a graph
_MOST_SAMPLES, _LEAST_SAMPLES = 100, 10


class Timing(NamedTuple):
    """Seconds per call, one value per sample, in order.

    Attributes:
        samples_s: mean over the calls of each sample.
        method: "events" means that no graph could be captured, so that launch gaps are included.
    """

    samples_s: tuple[float, ...]
    method: Literal["graph", "events", "clock"]

    @property
    def median_s(self) -> float:
        """The median sample."""
        return statistics.median(self.samples_s)

    @property
    def fast_s(self) -> float:
        """The 10th percentile."""
        return sorted(self.samples_s)[len(self.samples_s) // 10]

    @property
    def spread(self) -> float:
        """Distance of the 10th and 90th percentiles, relative to the median."""
        ordered = sorted(self.samples_s)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return (high - low) / self.median_s


def time_calls(calls: Sequence[Call], device: torch.device, *, seconds: float = 0.25) -> Timing:
    """Times a sequence of calls.

    Args:
        calls: calls on different inputs, repeated cyclically.
        device: device of the calls.
        seconds: approximate duration of the measurement, without warm-up.
    """
    if device.type != "cuda":
        return _by_clock(calls, seconds)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls:  # compiles kernels and creates handles and workspaces, which is not allowed in a capture
            call()
        pass_s = _pass_s(calls)
        num_passes = max(1, min(math.ceil(_GRAPH_S / pass_s), _MOST_CALLS // len(calls)))
        try:
            run: Call = _captured(calls, num_passes).replay
            method: Literal["graph", "events"] = "graph"
        except RuntimeError:
            torch.cuda.synchronize(device)
            run, method = lambda: _repeat(calls, num_passes), "events"
        samples = _by_events(run, seconds, pass_s * num_passes)
    return Timing(tuple(sample / (num_passes * len(calls)) for sample in samples), method)


def _captured(calls: Sequence[Call], num_passes: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(calls, num_passes)
    return graph


def _repeat(calls: Sequence[Call], num_passes: int) -> None:
    for _ in range(num_passes):
        for call in calls:
            call()


def _pass_s(calls: Sequence[Call]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    _repeat(calls, 2)
    end.record()
    end.synchronize()
    return max(1e-6, float(start.elapsed_time(end)) / 2e3)


def _by_events(run: Call, seconds: float, expected_s: float) -> list[float]:
    num_samples = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, math.ceil(seconds / expected_s)))
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num_samples)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _by_clock(calls: Sequence[Call], seconds: float) -> Timing:
    _repeat(calls, 1)
    samples: list[float] = []
    until_s = time.perf_counter() + seconds
    while len(samples) < 3 or (time.perf_counter() < until_s and len(samples) < _MOST_SAMPLES):
        started_s = time.perf_counter()
        _repeat(calls, 1)
        samples.append((time.perf_counter() - started_s) / len(calls))
    return Timing(tuple(samples), "clock")
