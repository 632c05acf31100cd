"""`ParallelGroup` over torch.distributed: NCCL between GPUs, gloo between CPU processes of one machine."""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.errors import ConfigError
from engine.parallel.symmetric_memory import SymmetricMemory, open_symmetric_memory

_MEETING_FILE = "ranks"

_log = logging.getLogger(__name__)

# The same function: the second name is deprecated from torch 2.13 on, the first does not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup:
    """The default process group of this process, from `join` to `leave`.

    Attributes:
        rank, size: as in `ParallelGroup`; known before `join`.
        device: device of the tensors of all calls.
        before_leaving: called before the group is left. CUDA graphs that contain collectives must be destroyed before
            the communicator is, which otherwise waits for them.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.before_leaving: Callable[[], None] = _nothing
        self._symmetric_memory: SymmetricMemory | None = None
        self.rank = rank
        self.size = size
        self.device = device

    def join(self, folder: Path, timeout_s: float) -> None:
        """Connects to the other ranks; returns when all have joined.

        Args:
            folder: writable for all ranks, and for no other user: its files determine the peers.
            timeout_s: timeout for joining and for every later collective.
        Raises: ConfigError: ranks are missing, or this build of torch cannot connect them.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks share a machine; gloo would resolve the host name
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(folder / _MEETING_FILE), self.size),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
                device_id=self.device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cannot connect {self.size} ranks over {backend}: {reason}") from error

    def use_symmetric_memory(self, dtype: torch.dtype) -> None:
        """Sums small tensors of this dtype in symmetric memory from now on, if all ranks can; logs which way it is.

        All ranks must call it, after `join`.
        """
        memory, reason = None, "another rank has none"
        try:
            memory = open_symmetric_memory(_group_name(), self.size, dtype, self.device)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if self.minimum(int(memory is not None)):
            self._symmetric_memory = memory
            _log.info("All-reduce: symmetric memory for small tensors, NCCL for others")
        else:
            _log.info("All-reduce: NCCL, symmetric memory cannot be used: %s", reason)

    def leave(self) -> None:
        """Leaves the group, if joined."""
        self.before_leaving()
        self._symmetric_memory = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over all ranks, in place or in new memory."""
        if self._symmetric_memory is not None and self._symmetric_memory.takes(x):
            return self._symmetric_memory.all_reduce(x)
        dist.all_reduce(x)
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[S, n] -> [S, size * n]."""
        num_rows, num_columns = x.shape
        gathered = x.new_empty(self.size * num_rows, num_columns)  # rank 0's rows first
        if x.numel():
            _all_gather(gathered, x.contiguous())
        return gathered.view(self.size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, -1)

    def broadcast(self, x: torch.Tensor) -> None:
        """Copies x from rank 0."""
        if x.numel():
            dist.broadcast(x, src=0)

    def minimum(self, number: int) -> int:
        """Returns the minimum over all ranks; blocks on the device."""
        tensor = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)


def _nothing() -> None:
    """Default of `before_leaving`."""


def _group_name() -> str:
    world = dist.group.WORLD
    assert world is not None, "not joined"
    return str(world.group_name)
