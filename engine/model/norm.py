"""The weight of an RMSNorm, with the factors of its model multiplied into it."""

import torch


class Norm:
    """Holds the weight of an RMSNorm: (stored + offset) * scale.

    Attributes:
        weight: [n], in fp32 where it differs from the stored one, so that it is not rounded. `finish` completes it.
    """

    def __init__(
        self, size: int, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0, scale: float = 1.0
    ) -> None:
        """Allocates the weight, uninitialised; dtype is that of the stored one."""
        self._offset, self._scale = offset, scale
        is_stored = offset == 0.0 and scale == 1.0
        self.weight = torch.empty(size, dtype=dtype if is_stored else torch.float32, device=device)

    def finish(self) -> None:
        """Adds the offset to the stored weight, and multiplies by the scale."""
        self.weight.add_(self._offset).mul_(self._scale)
