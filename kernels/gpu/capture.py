"""Captures work as a CUDA graph, so that a failed capture leaves the stream and torch's allocator usable."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class CaptureError(RuntimeError):
    """A capture failed; its message is the first line of the first error. The device is intact."""


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> Iterator[None]:
    """Captures the work that the block queues on the device; nothing runs.

    An operation that a capture does not allow makes the end of the capture fail too, which skips the rest of
    `torch.cuda.graph`: the capture's stream stays the current one, and in older versions the allocator still counts a
    capture, so that it never empties its cache again (pytorch#180395).

    Args:
        graph: new graph.
        pool: memory pool of the graph.
        device: current device.

    Raises:
        CaptureError: the block or the end of the capture raised a RuntimeError, such as out of memory.
        RuntimeError: the device failed.
    """
    stream = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except RuntimeError as error:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # it has ended already
            torch._C._cuda_endAllocateToPool(device.index, pool)
        torch.cuda.synchronize(device)
        raise CaptureError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Returns the first line of the error that began a chain of RuntimeErrors."""
    while isinstance(cause := error.__cause__ or error.__context__, RuntimeError):
        error = cause
    return (str(error).splitlines() or [type(error).__name__])[0]
