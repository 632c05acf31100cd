"""How long calls take on a device: CUDA graphs timed with events, medians; on a CPU the clock.

A graph of many calls hides what the host needs to launch them: what is left is the kernel. Calls come as a list over
different inputs, together larger than the L2 cache, so that nothing is found there that a model would not find.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

Call = Callable[[], object]

_GRAPH_S = 2e-3  # what a graph should last: events are exact to a microsecond
_MOST_CALLS = 512  # in a graph
_MOST_SAMPLES, _LEAST_SAMPLES = 100, 10


class Timing(NamedTuple):
    """Seconds per call, one value per sample, in order.

    Attributes:
        samples_s: each the mean over the calls of one sample.
        method: how they were taken; "events" means that a graph could not be captured, and includes launch gaps.
    """

    samples_s: tuple[float, ...]
    method: Literal["graph", "events", "clock"]

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Distance of the 10th and 90th percentile over the median."""
        ordered = sorted(self.samples_s)
        low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
        return (high - low) / self.median_s


def time_calls(calls: Sequence[Call], device: torch.device, *, seconds: float = 0.25) -> Timing:
    """Times calls that follow each other.

    Args:
        calls: each with inputs of its own; they are run in turn, again and again.
        device: where they compute.
        seconds: about how long to measure, warm-up not counted.
    """
    if device.type != "cuda":
        return _by_clock(calls, seconds)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and makes handles and workspaces, none of which a capture allows
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
