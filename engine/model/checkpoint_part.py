"""Maps tensors of a checkpoint, or the shards of them that a rank holds, to memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """A range of rows or columns of a tensor in the checkpoint: `size` of `total`, beginning at `start`."""

    total: int
    start: int
    size: int

    @classmethod
    def whole(cls, total: int) -> "Span":
        """Returns the range of all rows or columns."""
        return cls(total, 0, total)

    def times(self, width: int) -> "Span":
        """Returns the range in smaller units, `width` per unit: heads -> rows of a projection."""
        return Span(self.total * width, self.start * width, self.size * width)

    def in_blocks(self, size: int) -> "Span":
        """Returns the range in larger units of `size`, whose multiples its numbers are."""
        return Span(self.total // size, self.start // size, self.size // size)

    @property
    def parts(self) -> tuple["Span", ...]:
        """The span itself: a matrix that is not fused is one part."""
        return (self,)


class FusedSpan(NamedTuple):
    """Rows of matrices that the checkpoint stores one below the other as a single tensor.

    Attributes:
        parts: rows of each matrix.
    """

    parts: tuple[Span, ...]

    @property
    def total(self) -> int:
        """Rows of the tensor."""
        return sum(part.total for part in self.parts)

    @property
    def size(self) -> int:
        """Rows that are read."""
        return sum(part.size for part in self.parts)

    def in_blocks(self, size: int) -> "FusedSpan":
        """Returns the rows in larger units of `size`, see `Span.in_blocks`."""
        return FusedSpan(tuple(part.in_blocks(size) for part in self.parts))


class CheckpointPart(NamedTuple):
    """Memory of a parameter, and the part of a checkpoint tensor to read into it.

    Attributes:
        tensor: the memory; its shape is the sizes of the spans.
        spans: one per dimension of the tensor in the checkpoint; only the first can be fused.
        is_scale: whether it holds the scales of an 8-bit matrix: of blocks in two dimensions; or of rows in one, for
            which the checkpoint may have a single one.
    """

    tensor: torch.Tensor
    spans: tuple[Span | FusedSpan, ...]
    is_scale: bool = False

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "CheckpointPart":
        """Returns the part that is the whole tensor."""
        return cls(tensor, tuple(Span.whole(size) for size in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return tuple(span.total for span in self.spans)

    @property
    def is_row_scale(self) -> bool:
        """Whether it holds scales of rows."""
        return self.is_scale and len(self.spans) == 1

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole tensor."""
        return all(span.size == span.total for span in self.spans)

    def read(self, whole: Any) -> torch.Tensor:
        """Returns the values of the part; `whole` is the tensor in the checkpoint, or slices of it that read a file."""
        columns = [slice(span.start, span.start + span.size) for dim in self.spans[1:] for span in dim.parts]
        pieces, first_row = [], 0
        for span in self.spans[0].parts:
            start = first_row + span.start
            pieces.append(whole[(slice(start, start + span.size), *columns)])
            first_row += span.total
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


Fill = Callable[[dict[str, CheckpointPart]], None]
"""Fills parts, given by their names in the checkpoint."""
