"""Records what ran on the GPU meanwhile, with PyTorch's profiler."""

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from engine.bench.gpu.idle import Interval


def device_intervals(work: Callable[[], object]) -> list[Interval]:
    """Kernels and copies that ran on a GPU while `work` did; it must not leave any running."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return [
        Interval(event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type is DeviceType.CUDA
    ]
