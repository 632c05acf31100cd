"""Symmetric quantisation of activations, keys and values to 8 bits, with one scale per row."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.intrinsics import bytes_at, floats_at, longs_at, words_at
from kernels.cpu.jit import bits_float, float_bits, inline, kernel, strict_function, strict_kernel

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats, Ints

_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, which is left in the low bits
_ROUND_BITS = np.int32(0x4B400000)


@inline
def largest_magnitude(x: "Floats") -> np.float32:
    """Returns the largest absolute value; NaN if a value is not finite.

    Compares bits, which have the order of the magnitudes: integer comparisons are vectorised.
    """
    largest = np.int32(0)
    for i in range(x.shape[0]):
        largest = max(largest, float_bits(x[i]) & np.int32(0x7FFFFFFF))
    return bits_float(largest) if largest < np.int32(0x7F800000) else np.float32(np.nan)


@inline
def inverse_scale(largest: np.float32) -> np.float32:
    """Returns 127 / magnitude; 0 where the magnitude is close to zero or NaN."""
    return np.float32(127) / largest if largest > np.float32(1e-30) else np.float32(0)


@strict_function
def rounded(x: np.float32) -> np.int32:
    """Rounds a value below 2^22 in magnitude to the nearest integer."""
    return np.int32(float_bits(x + _ROUND) - _ROUND_BITS)


@strict_kernel
def quantize_row(x: "Floats", target: int, depth: int) -> np.float32:
    """Writes round(x / scale) + 128 as unsigned bytes, in 1..255.

    Args:
        x: [n] fp32.
        target: address of 4 * depth bytes; those past n become the zero point, 128.
        depth: groups of four bytes.
    Returns: the scale, largest magnitude / 127; NaN if a value is not finite, so that the whole row becomes NaN.
    """
    quantized = bytes_at(target, 4 * depth)
    largest = largest_magnitude(x)
    scale = largest / np.float32(127)
    factor = inverse_scale(largest)
    for i in range(x.shape[0]):
        quantized[i] = np.int8(rounded(x[i] * factor) + np.int32(128))
    for i in range(x.shape[0], 4 * depth):
        quantized[i] = np.int8(-128)
    return scale


@strict_kernel
def quantize_groups(x: "Floats", group_size: int, target: int, factors: int, step: int) -> None:
    """Quantises groups of a row, each with its own scale: writes round(x / scale) as signed bytes.

    Args:
        x: [n] fp32.
        group_size: values of a group, which divide n.
        target: address of n bytes.
        factors: address of the first scale, largest magnitude / 127, and step bytes behind it of the sum of the
            group's bytes times the scale; both are NaN if a value is not finite.
        step: bytes between two of these numbers.
    """
    quantized = bytes_at(target, x.shape[0])
    for begin in range(0, x.shape[0], group_size):
        group, values = x[begin : begin + group_size], quantized[begin : begin + group_size]
        largest = largest_magnitude(group)
        scale = largest / np.float32(127)
        factor = inverse_scale(largest)
        total = np.int32(0)
        for i in range(group_size):
            value = rounded(group[i] * factor)
            values[i] = np.int8(value)
            total += value
        floats_at(factors, 1)[0] = scale
        floats_at(factors + step, 1)[0] = scale * np.float32(total)
        factors += 2 * step


@kernel
def pack_groups(
    address: int,
    width: int,
    order: int,
    group_size: int,
    halves: bool,
    packed: "Ints",
    i: int,
    factors: int,
    scratch: int,
) -> None:
    """Quantises a row of inputs in groups, and packs it as row i of a tile, for `multiply_int8_by_groups`.

    Args:
        address: of the row, [width] fp32.
        width: inputs, a multiple of 8.
        order: address of the order of inputs, [width] int64; 0: as they are.
        group_size: inputs of a group.
        halves: whether weights have less than 8 bits: of each eight inputs those at even places come first.
        packed: the tile, [width / 4, rows].
        i: the row.
        factors: address of the tile's scales and sums, [groups, 2, rows].
        scratch: memory for 5 * width bytes.
    """
    x, num_rows = floats_at(address, width), packed.shape[1]
    if order:
        source, places = x, longs_at(order, width)
        x = floats_at(scratch + width, width)
        for k in range(width):
            x[k] = source[places[k]]
    quantize_groups(x, group_size, scratch, factors + 4 * i, 4 * num_rows)
    words = words_at(scratch, width // 4)
    if not halves:
        for k in range(width // 4):
            packed[k, i] = words[k]
        return
    for k in range(0, width // 4, 2):
        low, high = words[k], words[k + 1]
        packed[k, i] = _even_bytes(low) | _even_bytes(high) << 16
        packed[k + 1, i] = _even_bytes(low >> 8) | _even_bytes(high >> 8) << 16


@inline
def _even_bytes(word: np.int32) -> np.int32:
    """Returns bytes 0 and 2 of a word in its low half."""
    return (word & np.int32(0xFF)) | (word >> 8) & np.int32(0xFF00)
