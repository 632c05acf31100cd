"""What a rank knows of the others that share a model, and how their tensors meet."""

from dataclasses import dataclass
from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """The ranks that share one model: pipeline stages of consecutive layers, each divided among `size` ranks.

    Every rank runs the same steps in the same order, so that the n-th calls of all ranks belong together. Collectives
    are those of one stage. On a GPU they do not block the host: they are queued like kernels, and CUDA graphs can
    capture them.

    The stages form a ring. A step goes from the first to the last, and its result back to the first, which has the
    embedding and the output head, and samples.
    """

    @property
    def rank(self) -> int:
        """Rank of this process in its stage, 0 to size - 1; rank 0 of stage 0 schedules and samples."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks of a stage."""
        ...

    @property
    def stage(self) -> int:
        """Stage of this process, 0 to num_stages - 1."""
        ...

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of x over all ranks; x is contiguous, of any shape, and may be overwritten."""
        ...

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenates the columns of all ranks in rank order: [S, n] -> [S, size * n], bit-identical on every rank."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Copies rank 0's x to all ranks; contiguous, of the same shape and dtype on all of them."""
        ...

    def send_onward(self, x: torch.Tensor) -> None:
        """Sends a copy of x to the next stage, from the last one to the first, without waiting for its arrival."""
        ...

    def receive(self, out: torch.Tensor) -> None:
        """Fills out, contiguous, with the next tensor of the previous stage; it has the same shape and dtype."""
        ...

    def minimum(self, number: int) -> int:
        """Returns the minimum over all ranks of all stages. Blocks on the device: for start-up only."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A rank without others: the whole model, whose collectives do nothing. With other numbers it only stands for a
    rank, to size or describe what that one holds.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Does nothing."""

    def send_onward(self, x: torch.Tensor) -> None:
        """There is no other stage."""
        raise NotImplementedError

    def receive(self, out: torch.Tensor) -> None:
        """There is no other stage."""
        raise NotImplementedError

    def minimum(self, number: int) -> int:
        """Returns the number."""
        return number


SINGLE_RANK = SingleRank()
