"""Streams: run a step's work at once on the caller's thread, or later on a device, in order.

Queued work may run at any time until an event after it has been waited for; until then its memory must not be changed.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the queue of work."""

    def wait(self) -> None:
        """Waits until all work queued before the event is done.

        Raises: RuntimeError: the device failed.
        """
        ...


class Stream(Protocol):
    """A queue of device work.

    Attributes:
        device: device of the tensors.
        is_inline: work is done when `run` returns, and device memory is host memory.
    """

    @property
    def device(self) -> torch.device:
        """See the class."""
        ...

    @property
    def is_inline(self) -> bool:
        """See the class."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns host memory that the device can copy asynchronously: [num_bytes] uint8, uninitialized."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Queues work after all earlier work; `work` is called once, now or later."""
        ...

    def mark(self) -> Event:
        """Returns an event after all earlier work."""
        ...


class InlineStream:
    """Runs work at once on the caller's thread, for a CPU engine."""

    device = torch.device("cpu")
    is_inline = True

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns ordinary memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        """Runs the work."""
        work()

    def mark(self) -> Event:
        """Returns an event that has passed."""
        return _PAST


class _PastEvent:
    def wait(self) -> None:
        """Returns at once."""


_PAST = _PastEvent()


class CudaStream:
    """A CUDA (or ROCm) stream: `run` calls the work at once, and what that launches is asynchronous.

    Work is called in order on the host's thread, with this stream as the current one, and must not block on the device.
    Buffers are pinned, from torch's caching allocator.
    """

    is_inline = False

    def __init__(self, device: torch.device) -> None:
        """Uses the current stream, so that steps run after the work that prepares weights and caches."""
        self.device = device
        self._stream = torch.cuda.current_stream(device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def run(self, work: Callable[[], None]) -> None:
        """Calls the work with this stream as the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Event:
        """Returns a CUDA event. Waiting for it spins, because a sleeping thread would wake up late."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Waits without the GIL.

        Raises: RuntimeError: a kernel failed.
        """
        self._event.synchronize()
