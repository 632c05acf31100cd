"""Symmetric quantisation of activations, keys and values to 8 bits, with one scale per row."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.intrinsics import bytes_at
from kernels.cpu.jit import bits_float, float_bits, inline, strict_kernel

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats

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


@inline
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
