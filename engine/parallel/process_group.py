"""`ParallelGroup` over torch.distributed: NCCL between GPUs, gloo between CPU processes, on one machine or several."""

import logging
import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.errors import ConfigError
from engine.parallel.layout import RankLayout
from engine.parallel.symmetric_memory import SymmetricMemory, open_symmetric_memory

_MEETING_FILE = "ranks"

_MAX_SENDS = 8
"""Tensors on their way to the next stage, whose memory is held; beyond these, sending waits for the oldest."""

_log = logging.getLogger(__name__)

# The same function: the second name is deprecated from torch 2.13 on, the first does not exist before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class StorePlace(NamedTuple):
    """Where ranks on several machines find each other: torch's TCPStore, which rank 0 opens.

    Attributes:
        host: address of rank 0's machine.
        port: port of the store.
        interface: network interface of this machine for gloo; None: gloo's choice, by the host name.
    """

    host: str
    port: int
    interface: str | None = None


Meeting = Path | StorePlace
"""Where the ranks meet: on one machine a folder that all can write, and no other user; its files determine the peers.
"""


class ProcessGroup:
    """The process groups of this process, from `join` to `leave`.

    Attributes:
        rank, size, stage, num_stages: as in `ParallelGroup`; known before `join`.
        layout: of all ranks.
        device: device of the tensors of all calls.
        before_leaving: called before the group is left. CUDA graphs that contain collectives must be destroyed before
            the communicator is, which otherwise waits for them.
    """

    def __init__(self, global_rank: int, layout: RankLayout, device: torch.device) -> None:
        """Args: global_rank: among the ranks of all stages."""
        self.before_leaving: Callable[[], None] = _nothing
        self._symmetric_memory: SymmetricMemory | None = None
        self._global_rank = global_rank
        self.layout = layout
        self.rank, self.size = layout.tensor_rank_of(global_rank), layout.tensor_size
        self.stage, self.num_stages = layout.stage_of(global_rank), layout.num_stages
        self.device = device
        self._of_stage: dist.ProcessGroup | None = None  # None: the default group, of all ranks
        self._to_next: dist.ProcessGroup | None = None  # with this rank's like in the next stage
        self._from_previous: dist.ProcessGroup | None = None
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def join(self, meeting: Meeting, timeout_s: float) -> None:
        """Connects to the other ranks; returns when all have joined.

        Args:
            meeting: the same for all ranks.
            timeout_s: timeout for joining and for every later collective.
        Raises: ConfigError: ranks are missing, or this build of torch cannot connect them.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if isinstance(meeting, Path):  # gloo would resolve the host name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif meeting.interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        timeout, num_ranks = timedelta(seconds=timeout_s), self.layout.num_ranks
        try:
            dist.init_process_group(
                backend,
                store=_open_store(meeting, self._global_rank, num_ranks, timeout),
                rank=self._global_rank,
                world_size=num_ranks,
                timeout=timeout,
                device_id=self.device if backend == "nccl" else None,
            )
            if self.num_stages > 1:
                self._divide(timeout)
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"cannot connect {num_ranks} ranks over {backend}: {reason}") from error

    def _divide(self, timeout: timedelta) -> None:
        """Makes a group of each stage, and one of each pair of neighbours in the ring of stages.

        All ranks make all groups. A pair has a group for each direction: NCCL queues what one group does, and a stage
        must not wait with sending until it has received.
        """
        size, num_stages = self.size, self.num_stages
        for stage in range(num_stages):
            first = stage * size
            group = dist.new_group(list(range(first, first + size)), timeout=timeout)
            if stage == self.stage:
                self._of_stage = group
            for rank in range(size):
                link = dist.new_group([first + rank, (stage + 1) % num_stages * size + rank], timeout=timeout)
                if rank == self.rank and stage == self.stage:
                    self._to_next = link
                if rank == self.rank and (stage + 1) % num_stages == self.stage:
                    self._from_previous = link

    def use_symmetric_memory(self, dtype: torch.dtype) -> None:
        """Sums small tensors of this dtype in symmetric memory from now on, if all ranks can; logs which way it is.

        All ranks must call it, after `join`. A stage of one rank sums nothing.
        """
        if self.size == 1:
            return
        memory, reason = None, "another rank has none"
        try:
            memory = open_symmetric_memory(self._group_name(), self.size, dtype, self.device)
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
        self._sends.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over all ranks, in place or in new memory."""
        if self.size == 1:  # a pipeline stage
            return x
        if self._symmetric_memory is not None and self._symmetric_memory.takes(x):
            return self._symmetric_memory.all_reduce(x)
        dist.all_reduce(x, group=self._of_stage)
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[S, n] -> [S, size * n]."""
        if self.size == 1:
            return x
        num_rows, num_columns = x.shape
        gathered = x.new_empty(self.size * num_rows, num_columns)  # rank 0's rows first
        if x.numel():
            _all_gather(gathered, x.contiguous(), group=self._of_stage)
        by_rank = gathered.view(self.size, num_rows, num_columns)
        return by_rank.transpose(0, 1).reshape(num_rows, self.size * num_columns)  # also without rows

    def broadcast(self, x: torch.Tensor) -> None:
        """Copies x from rank 0."""
        if x.numel():
            dist.broadcast(x, src=self.stage * self.size, group=self._of_stage)

    def send_onward(self, x: torch.Tensor) -> None:
        """Sends a copy: x is memory of the step, which the next one overwrites."""
        if len(self._sends) == _MAX_SENDS:
            self._sends.popleft()[0].wait()
        x = x.clone()
        receiver = (self._global_rank + self.size) % self.layout.num_ranks
        self._sends.append((dist.isend(x, receiver, group=self._to_next), x))

    def receive(self, out: torch.Tensor) -> None:
        """Receives; a CPU blocks until it has, a GPU's stream waits."""
        sender = (self._global_rank - self.size) % self.layout.num_ranks
        work = dist.irecv(out, sender, group=self._from_previous)
        assert work is not None, "this rank is not in the group of the previous stage"
        work.wait()

    def minimum(self, number: int) -> int:
        """Returns the minimum over all ranks of all stages; blocks on the device."""
        tensor = torch.tensor(number, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def _group_name(self) -> str:
        group = self._of_stage or dist.group.WORLD
        assert group is not None, "not joined"
        return str(group.group_name)


def _nothing() -> None:
    """Default of `before_leaving`."""


def _open_store(meeting: Meeting, rank: int, num_ranks: int, timeout: timedelta) -> Any:
    if isinstance(meeting, Path):
        return dist.FileStore(str(meeting / _MEETING_FILE), num_ranks)  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host, meeting.port, num_ranks, is_master=rank == 0, timeout=timeout
    )
