"""Sizes of a gated delta rule layer; torch is not imported. See `kernels.delta_rule`."""

from typing import NamedTuple


class DeltaHeads(NamedTuple):
    """Sizes of a layer. Each key head is shared by the same number of value heads.

    Attributes:
        num_key_heads, key_dim: of queries and keys.
        num_value_heads, value_dim: of values; the number is a multiple of that of key heads.
        conv_width: tokens that the convolution sees, including the present one; at least 2.
        is_tiled: whether value head i has key head i % num_key_heads, as llama.cpp stores them, instead of
            i * num_key_heads // num_value_heads.
    """

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    conv_width: int
    is_tiled: bool = False

    @property
    def num_adjacent(self) -> int:
        """Number of adjacent value heads with the same key head: i // num_adjacent % num_key_heads for value head i."""
        return 1 if self.is_tiled else self.num_value_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        """Columns of all queries, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Columns of all values, and of z."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Columns that the convolution changes: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state_size(self) -> int:
        """Values in the state of one request."""
        in_convolution = self.num_channels * (self.conv_width - 1)
        return in_convolution + self.num_value_heads * self.key_dim * self.value_dim
