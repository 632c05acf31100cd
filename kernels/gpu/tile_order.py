"""The order in which programs of a matrix product take its tiles."""

import triton
import triton.language as tl

_ROW_TILES = tl.constexpr(8)
"""Tiles of rows whose programs are adjacent: they read the same weights while these are in the L2 cache. In a mixture
most of them are of one expert."""


@triton.jit
def tile_of_program(num_rows, NUM_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the numbers of the tile of rows and of the tile of columns that a program takes.

    There is one program for each pair of them. If rows are divided into tiles in another way, num_rows is the number of
    these tiles and BLOCK_M is 1.
    """
    COLUMN_TILES: tl.constexpr = (NUM_COLUMNS + BLOCK_N - 1) // BLOCK_N
    first_row_tile = tl.program_id(0) // (_ROW_TILES * COLUMN_TILES) * _ROW_TILES
    num_row_tiles = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - first_row_tile, _ROW_TILES)
    place = tl.program_id(0) % (_ROW_TILES * COLUMN_TILES)
    return first_row_tile + place % num_row_tiles, place // num_row_tiles
