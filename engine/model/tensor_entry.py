"""Where a tensor is in a file with weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and position of a tensor.

    Attributes:
        dtype: name of the type in the format of the file.
        start, stop: its bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
