"""All-reduce of small tensors between the GPUs of a machine, in memory that they map from each other.

In a decode step with few rows an all-reduce moves less than a megabyte, and NCCL's protocol takes longer than the data.
torch's symmetric memory needs one kernel: each GPU reads all others' tensors and adds them in rank order (one shot), or
the switch adds them (multimem). Every rank gets the same bits. Never run on GPUs so far.
"""

from typing import Any

import torch

from kernels.dtypes import dtype_name

_MAX_READ_BYTES = 2 << 20
"""Bytes that a GPU reads in the one-shot form, tensors of all ranks together. An estimate, not measured: it reads
(size - 1) times a tensor, where a ring moves it twice in more steps."""

_MAX_MULTICAST_BYTES = 8 << 20
"""Largest tensor that the switch adds up; beyond it, time is bandwidth. An estimate, not measured."""

_ALIGNMENT = 16
_DTYPES = (torch.bfloat16, torch.float32)


class SymmetricMemory:
    """A buffer of this rank that all ranks can read, and the sums computed with it.

    All ranks call it in the same order. CUDA graphs can capture it: kernels of the ranks wait for each other on the
    devices, before they read and before they end, so that the next call can use the buffer again.
    """

    def __init__(self, buffer: torch.Tensor, group_name: str, size: int, *, has_multicast: bool) -> None:
        """Takes the buffer that the ranks have exchanged, of `buffer_bytes(size, has_multicast)` at least."""
        self._buffer = buffer
        self._group_name = group_name
        self._max_one_shot_bytes = _MAX_READ_BYTES // size
        self._max_bytes = buffer_bytes(size, has_multicast)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it sums x; depends only on dtype and size, which are the same on all ranks."""
        return x.dtype is self._buffer.dtype and 0 < x.nbytes <= self._max_bytes and x.nbytes % _ALIGNMENT == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of x over all ranks, in new memory, bit-identical on every rank; x is contiguous."""
        own = self._buffer[: x.numel()]
        own.copy_(x.view(-1))
        if x.nbytes <= self._max_one_shot_bytes:
            total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._group_name)
        else:
            total = torch.ops.symm_mem.multimem_all_reduce_(own, "sum", self._group_name).clone()
        return total.view(x.shape)


def buffer_bytes(size: int, has_multicast: bool) -> int:
    """Returns the largest tensor that is summed."""
    return _MAX_MULTICAST_BYTES if has_multicast else _MAX_READ_BYTES // size


def open_symmetric_memory(group_name: str, size: int, dtype: torch.dtype, device: torch.device) -> SymmetricMemory:
    """Allocates the buffer and exchanges it with the other ranks, which must call it too.

    Raises: RuntimeError: this torch, GPU or dtype has no symmetric memory, or the GPUs cannot map each other's.
    """
    if dtype not in _DTYPES:
        raise RuntimeError(f"it has no sums in {dtype_name(dtype)}")
    try:
        import torch.distributed._symmetric_memory as symmetric

        module: Any = symmetric
        buffer = module.empty(_MAX_MULTICAST_BYTES // dtype.itemsize, dtype=dtype, device=device)
        handle = module.rendezvous(buffer, group_name)
        return SymmetricMemory(buffer, group_name, size, has_multicast=bool(handle.multicast_ptr))
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise RuntimeError(f"torch {torch.__version__} has none: {error}") from error
