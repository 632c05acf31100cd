"""How tensors of a GGUF file differ from those of the decoder."""

from typing import NamedTuple


class TensorLayout(NamedTuple):
    """Changes that llama.cpp's converter made to a tensor.

    Attributes:
        num_rotated_heads: number of heads whose rows have rotated pairs beside each other; None: rows are in order.
        offset: what was added to all numbers.
        is_negative_exp: whether the numbers are -exp of the decoder's.
    """

    num_rotated_heads: int | None = None
    offset: float = 0.0
    is_negative_exp: bool = False
