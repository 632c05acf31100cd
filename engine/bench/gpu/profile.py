"""Records kernels and copies on the GPU with PyTorch's profiler."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from engine.bench.gpu.idle import Interval


def device_intervals(work: Callable[[], object]) -> list[Interval]:
    """Returns the kernels and copies that ran on a GPU during `work`, which must wait for all of them."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return [
        Interval(event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA  # each event has its own object for it: `is` is false
    ]
