"""`ParallelGroup` over torch.distributed: NCCL between GPUs, gloo between CPU processes of one machine."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from engine.errors import ConfigError

_MEETING_FILE = "ranks"

# One function under two names: the second is deprecated from torch 2.13 on, the first is not there before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup:
    """The default process group of this process, from `join` to `leave`.

    Attributes:
        rank, size: as in `ParallelGroup`; known before `join`.
        device: where the tensors of all calls lie.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    def join(self, folder: Path, timeout_s: float) -> None:
        """Meets the other ranks; returns when all are there.

        Args:
            folder: one that all ranks can write to, and nobody else: what is in it decides whom they talk to.
            timeout_s: for the meeting, and for every collective after it.
        Raises: ConfigError: they did not come, or this build of torch cannot connect them.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks share a machine; else gloo looks up its host name
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
            raise ConfigError(f"{self.size} ranks cannot be joined over {backend}: {reason}") from error

    def leave(self) -> None:
        """Ends the group; may be called without one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in x."""
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
        """From rank 0."""
        if x.numel():
            dist.broadcast(x, src=0)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, for start-up: waits for the device."""
        tensor = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)
