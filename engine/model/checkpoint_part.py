"""What of a tensor in the checkpoint belongs into which memory: all of it, or the part that a rank holds."""

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """A run of rows or columns of a tensor in the checkpoint: `size` of `total`, from `start` on."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "Span":
        """All of them."""
        return cls(total, 0, total)

    def times(self, width: int) -> "Span":
        """The same of units that are `width` rows each: heads -> rows of a projection."""
        return Span(self.total * width, self.start * width, self.size * width)


class CheckpointPart(NamedTuple):
    """Memory of a parameter, and what is to be read into it.

    Attributes:
        tensor: to be filled, of the spans' sizes.
        spans: one per dimension of the tensor in the checkpoint.
        is_scale: scales of an 8-bit matrix's rows, of which the checkpoint may have just one.
    """

    tensor: torch.Tensor
    spans: tuple[Span, ...]
    is_scale: bool = False

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "CheckpointPart":
        """Memory for all of a tensor."""
        return cls(tensor, tuple(Span.whole(size) for size in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        return tuple(span.total for span in self.spans)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the part out of the tensor in the checkpoint."""
        return tuple(slice(span.start, span.start + span.size) for span in self.spans)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return all(span.size == span.total for span in self.spans)
