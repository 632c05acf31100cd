"""The weight of an RMSNorm, with the factors of its model multiplied into it."""

import torch


class Norm:
    """Holds the weight of an RMSNorm: (stored[order] + offset) * scale.

    Attributes:
        weight: [n], in fp32 where it differs from the stored one, so that it is not rounded. `finish` completes it.
    """

    def __init__(
        self,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
        scale: float = 1.0,
        order: torch.Tensor | None = None,
    ) -> None:
        """Allocates the weight, uninitialised.

        Args:
            size: number of values.
            dtype: of the stored ones.
            device: of the weight.
            offset, scale: see the class.
            order: [size] int64; None: the stored one.
        """
        self._offset, self._scale, self._order = offset, scale, order
        is_stored = offset == 0.0 and scale == 1.0
        self.weight = torch.empty(size, dtype=dtype if is_stored else torch.float32, device=device)

    def finish(self) -> None:
        """Orders the stored weight, adds the offset, and multiplies by the scale."""
        if self._order is not None:
            self.weight.copy_(self.weight[self._order.to(self.weight.device)])
        self.weight.add_(self._offset).mul_(self._scale)
