"""What a model needs of the ranks that share it (tensor parallelism as in Megatron-LM, arXiv:1909.08053)."""

from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """The ranks that hold one model together.

    Every rank runs the same steps in the same order, so the n-th call of one rank meets the n-th call of all others.
    What steps call never waits on the host for a device: collectives are queued like kernels, and can be captured.
    """

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1; rank 0 schedules and samples."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, of any shape, contiguous; may be written into x."""
        ...

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' columns side by side, rank 0's first: x [S, n] -> [S, size * n], the same bits on every rank."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x, written into everybody's; contiguous, of one shape and dtype on all ranks."""
        ...

    def least(self, number: int) -> int:
        """The least of all ranks' numbers. For start-up: this one waits for the device."""
        ...


class SingleRank:
    """A model that one process holds whole: nothing to add, to gather or to hand over, at no cost."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Nothing to do."""

    def least(self, number: int) -> int:
        """The number itself."""
        return number


SINGLE_RANK = SingleRank()
