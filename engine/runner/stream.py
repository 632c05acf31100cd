"""Where a step's work runs: at once on the caller's thread, or later on a device that keeps the order of what it is
given.

The runner speaks to this seam only. What it queues may be done at any time until the event that follows it has been
waited for; until then the memory that the work reads and writes must be left alone.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A mark among queued work."""

    def wait(self) -> None:
        """Returns when all work queued before the mark is done.

        Raises: RuntimeError: the device has failed.
        """
        ...


class Stream(Protocol):
    """A queue of device work.

    Attributes:
        device: where tensors live that its work uses.
        is_inline: work is done when `run` returns, and the device's memory is the host's.
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
        """Host memory that the device copies from and to without the host's help: [num_bytes] uint8, not cleared."""
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Queues work behind all that was queued before. `work` may be called now or later, once."""
        ...

    def mark(self) -> Event:
        """An event behind all that was queued before."""
        ...


class InlineStream:
    """The host's own thread as a stream: a CPU engine, where a step has nothing to overlap with."""

    device = torch.device("cpu")
    is_inline = True

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory like any other."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        """Does the work."""
        work()

    def mark(self) -> Event:
        """An event that is past."""
        return _PAST


class _PastEvent:
    def wait(self) -> None:
        """Returns at once."""


_PAST = _PastEvent()


class CudaStream:
    """A CUDA (or ROCm) stream: `run` calls the work at once, and what that launches is asynchronous.

    Work is therefore called in order on the host's thread, with this stream as the current one; it must not wait for
    the device. Buffers are pinned, from torch's caching allocator.
    """

    is_inline = False

    def __init__(self, device: torch.device) -> None:
        """Takes the stream that is current now: weights and caches prepared on it are in order with the steps."""
        self.device = device
        self._stream = torch.cuda.current_stream(device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def run(self, work: Callable[[], None]) -> None:
        """Calls the work with this stream as the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> Event:
        """A CUDA event. Waiting for it spins: a thread that slept would be woken late, and with it the next step."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Waits without the GIL.

        Raises: RuntimeError: a kernel has failed.
        """
        self._event.synchronize()
