"""Memory in pages of 2 MiB, for what steps read a lot of: weights, keys and values, activations.

A page of 4 KiB holds one or two rows of a matrix, or 16 keys of a head: reading such memory waits for translations of
addresses, twice as long in a virtual machine. Linux has larger pages for programs that ask for them (madvise(2), the
default of most distributions), and for all others only where it is configured so.
"""

import contextlib
import math
import mmap

import torch

_PAGE_BYTES = 1 << 21


def allocate(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor of undefined values; one of at least 2 MiB is in huge pages where the system has them.

    Raises: RuntimeError: out of memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if num_bytes < _PAGE_BYTES or advice is None:
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"{num_bytes} bytes cannot be allocated: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
