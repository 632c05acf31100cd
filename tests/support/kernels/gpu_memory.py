"""The memory of a fake GPU: a model of torch's caching allocator on tensors that may have no memory at all.

Freed blocks stay reserved in their pool for later tensors, and return to the GPU when the cache is emptied. Each memory
pool of CUDA graphs is separate and keeps its blocks as long as one of its graphs exists. Blocks of a pool may be split
and joined at will, so fragmentation is not modelled.
"""

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK_BYTES = 512


class FakeGpuMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the tensors made on the device `meta` while it is active (`with memory:`).

    Attributes:
        pool: where tensors are allocated; None: the default pool.
        num_graphs: existing graphs, by pool.
    """

    def __init__(self, total_bytes: int = 1 << 40, *, used_bytes: int = 0) -> None:
        """Args: total_bytes, used_bytes: size, and use outside the allocator."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool: object = None
        self.num_graphs: Counter[object] = Counter()
        self._total_bytes, self._used_bytes = total_bytes, used_bytes
        self._live_bytes: Counter[object] = Counter()
        self._reserved_bytes: Counter[object] = Counter()
        self._max_reserved_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Counts the new storages among the results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self._count(tensor.untyped_storage())
        return result

    def use(self, num_bytes: int) -> None:
        """Takes memory outside the allocator, or returns it if negative."""
        self._used_bytes += num_bytes

    def patches(self) -> dict[str, object]:
        """Returns the replacements by their name in `torch.cuda`."""
        return {
            "empty_cache": self.empty_cache,
            "mem_get_info": lambda _device: (self._total_bytes - self._used_bytes - self._reserved, self._total_bytes),
            "memory_reserved": lambda _device: self._reserved,
            "max_memory_reserved": lambda _device: self._max_reserved_bytes,
            "reset_peak_memory_stats": self._reset_peak,
        }

    def empty_cache(self) -> None:
        """Returns unused blocks to the GPU, except those of pools of graphs."""
        for pool in self._reserved_bytes:
            if not self.num_graphs[pool]:
                self._reserved_bytes[pool] = self._live_bytes[pool]

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that exist."""
        return self._live_bytes.total()

    @property
    def _reserved(self) -> int:
        return self._reserved_bytes.total()

    def _reset_peak(self, _device: object) -> None:
        self._max_reserved_bytes = self._reserved

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        pool, num_bytes = self.pool, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._free, storage._cdata, pool, num_bytes)
        self._live_bytes[pool] += num_bytes
        self._reserved_bytes[pool] = max(self._reserved_bytes[pool], self._live_bytes[pool])
        self._max_reserved_bytes = max(self._max_reserved_bytes, self._reserved)

    def _free(self, key: int, pool: object, num_bytes: int) -> None:
        self._known.discard(key)
        self._live_bytes[pool] -= num_bytes
