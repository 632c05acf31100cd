"""Maps tensors of a checkpoint, or the shards of them that a rank holds, to memory."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

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
        """Returns the range in larger units of `size`, whose multiple it begins at; the last unit may be partial."""
        return Span(-(-self.total // size), self.start // size, -(-self.size // size))

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


Rows: TypeAlias = Mapping[str, Span | FusedSpan]
"""Rows of projections that form one matrix, one below the other, by their names in the checkpoint."""


def rows_of(rows: Rows) -> int:
    """Returns the rows of the matrix."""
    return sum(span.size for span in rows.values())


def stacked(rows: Rows) -> list[tuple[str, Span | FusedSpan, slice]]:
    """Returns name, rows in the checkpoint, and rows of the matrix, of each projection."""
    below, start = [], 0
    for name, span in rows.items():
        below.append((name, span, slice(start, start + span.size)))
        start += span.size
    return below


class CheckpointPart(NamedTuple):
    """Memory of a parameter, and the part of a checkpoint tensor to read into it.

    Attributes:
        tensor: the memory; its shape is the sizes of the spans.
        spans: one per dimension of the tensor in the checkpoint; one of them can be fused.
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
        pieces = [self._slices(span) for span in self.spans]
        fused = next((dim for dim, slices in enumerate(pieces) if len(slices) > 1), 0)
        read = []
        for piece in pieces[fused]:
            index = tuple(piece if dim == fused else slices[0] for dim, slices in enumerate(pieces))
            read.append(whole[index])
        return read[0] if len(read) == 1 else torch.cat(read, dim=fused)

    @staticmethod
    def _slices(span: Span | FusedSpan) -> list[slice]:
        """Returns where the parts of a span lie in the tensor."""
        slices, first = [], 0
        for part in span.parts:
            slices.append(slice(first + part.start, first + part.start + part.size))
            first += part.total
        return slices


Fill = Callable[[dict[str, CheckpointPart]], None]
"""Fills parts, given by their names in the checkpoint."""

_T = TypeVar("_T")


class Recall(Protocol):
    """Returns packed weights by a name that is unique in the model: those of an earlier start, or what `pack` makes."""

    def __call__(self, name: str, pack: Callable[[], _T], /) -> _T:
        """Calls `pack` if there are none."""
        ...


def pack_anew(_name: str, pack: Callable[[], _T], /) -> _T:
    """Implements `Recall` without an earlier start."""
    return pack()
