"""RMSNorms: their weights, with the factors of the model multiplied into them, and norms of what ranks share."""

from collections.abc import Sequence

import torch

from engine.model.checkpoint_part import CheckpointPart, Span
from engine.parallel.group import ParallelGroup


class Norm:
    """Holds the weight of an RMSNorm: (stored[order] + offset) * scale.

    Attributes:
        weight: [n], in fp32 where it differs from the stored one, so that it is not rounded. `finish` completes it.
        part: the part of the checkpoint that fills it.
    """

    def __init__(
        self,
        span: Span,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
        scale: float = 1.0,
        order: torch.Tensor | None = None,
    ) -> None:
        """Allocates the weight, uninitialised.

        Args:
            span: which values of the stored one.
            dtype: of the stored ones.
            device: of the weight.
            offset, scale: see the class.
            order: [n] int64; None: the stored one.
        """
        self._offset, self._scale, self._order = offset, scale, order
        is_stored = offset == 0.0 and scale == 1.0
        self.weight = torch.empty(span.size, dtype=dtype if is_stored else torch.float32, device=device)
        self.part = CheckpointPart(self.weight, (span,))

    def finish(self) -> None:
        """Orders the stored weight, adds the offset, and multiplies by the scale."""
        if self._order is not None:
            self.weight.copy_(self.weight[self._order.to(self.weight.device)])
        self.weight.add_(self._offset).mul_(self._scale)


def norm_columns_of_ranks(x: torch.Tensor, weights: Sequence[torch.Tensor], eps: float, group: ParallelGroup) -> None:
    """RMSNorms over consecutive columns of x [T, m], in place, each over the values of all ranks.

    Every rank has as many values. Copies of the same heads count alike, so that they leave the mean as it is.

    Args:
        weights: of the columns of this rank, [n] each, from the first column on.
    """
    sizes = [len(weight) for weight in weights]
    columns = torch.split(x[:, : sum(sizes)], sizes, dim=1)
    means = torch.stack([part.float().square().mean(dim=1, keepdim=True) for part in columns])
    means = group.all_reduce(means) / group.size
    for part, mean, weight in zip(columns, means, weights, strict=True):
        part.copy_(part.float() * torch.rsqrt(mean + eps) * weight)
