"""8-bit floats with 3 bits of mantissa (e4m3, arXiv:2209.05433) inside kernels: scales, and the rounding.

GPUs round to the nearest value, ties to even, with an instruction of their own: `cvt.rn.satfinite.e4m3x2.f32` on NVIDIA
from sm_89 on, which also clamps too large values; `v_cvt_pk_fp8_f32` on gfx942. Clamping does not matter here: rows are
divided by a scale that maps their largest value to the format's.
Triton's interpreter rounds ties away from zero, loses carries into the exponent and has no NaN, so for it the same
rounding is done in integers.
"""

import torch
import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def float8_scale(largest, FLOAT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scale and 1 / scale for values of up to `largest` in magnitude; both 1 where that is close to zero.

    A NaN among the values is ignored and stays NaN. An infinite value makes its whole row NaN.
    """
    MAX: tl.constexpr = 448.0 if tl.float8e4nv == FLOAT8 else 240.0
    largest = tl.where(largest > 1e-30, largest, MAX)
    return largest / MAX, MAX / largest


@triton.jit
def store_float8(ptrs, x, mask):  # type: ignore[no-untyped-def]
    """Rounds fp32 values and writes them to pointers to 8-bit floats."""
    if _IS_INTERPRETED:
        tl.store(ptrs.to(tl.pointer_type(tl.uint8), bitcast=True), _float8_codes(x), mask=mask)
    else:
        tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _float8_codes(x):  # type: ignore[no-untyped-def]
    """Returns the bytes of a GPU's conversion to float8_e4m3fn, the only such format under the interpreter."""
    word = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(word & 0x7FFFFFFF, 0x44000000)  # 512, which is too large already
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # 2^14 + 2^-9 is the next fp32 number after 2^14: the sum is rounded to multiples of the smallest value
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - ((127 + 14) << 23)
    code = tl.where(magnitude < ((127 - 6) << 23), subnormal, tl.minimum(normal, 0x7E)) | ((word >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


def as_fnuz(values: torch.Tensor) -> torch.Tensor:
    """Returns half of float8_e4m3fn values as float8_e4m3fnuz: the same bits, except NaN and -0, which it lacks."""
    bits = values.view(torch.uint8)
    is_nan = (bits & 0x7F) == 0x7F
    return torch.where(bits == 0x80, 0, torch.where(is_nan, 0x80, bits)).to(torch.uint8).view(torch.float8_e4m3fnuz)


@triton.jit
def widen_float8(codes, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts bytes of float8_e4m3fn exactly, on GPUs without this float; NaN becomes 480.

    Sign, exponent and mantissa move to their places in fp16, whose exponent has a bias of 15 instead of 7.
    """
    word = codes.to(tl.uint16)
    half = (((word & 0x80) << 8) | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return (half * 256.0).to(DTYPE)
