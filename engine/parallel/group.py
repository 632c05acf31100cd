"""Collectives of the ranks that share a model (tensor parallelism as in Megatron-LM, arXiv:1909.08053)."""

from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """The ranks that share one model.

    Every rank runs the same steps in the same order, so that the n-th calls of all ranks belong together. Collectives
    of a step do not block the host: they are queued like kernels, and CUDA graphs can capture them.
    """

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to size - 1; rank 0 schedules and samples."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
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

    def minimum(self, number: int) -> int:
        """Returns the minimum over all ranks. Blocks on the device: for start-up only."""
        ...


class SingleRank:
    """A group of one rank, whose collectives do nothing."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Does nothing."""

    def minimum(self, number: int) -> int:
        """Returns the number."""
        return number


SINGLE_RANK = SingleRank()
