"""bf16 and fp16 are widened to the values that PyTorch has for them: all 65,536 bit patterns of each."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from kernels.cpu.two_bytes import bf16_to_fp32, fp16_by_integers, fp16_to_fp32

PATTERNS = np.arange(-(2**15), 2**15).astype(np.int16)


@njit
def _widened(widen: Any, bits: Any) -> Any:
    result = np.empty(bits.shape[0], dtype=np.float32)
    for i in range(bits.shape[0]):
        result[i] = widen(bits[i])
    return result


@njit
def _bf16(bits: Any) -> Any:
    return bf16_to_fp32(bits)


@njit
def _fp16(bits: Any) -> Any:
    return fp16_to_fp32(bits)


@njit
def _fp16_by_integers(bits: Any) -> Any:
    return fp16_by_integers(bits)


@pytest.mark.parametrize(
    ("widen", "dtype"), [(_bf16, torch.bfloat16), (_fp16, torch.float16), (_fp16_by_integers, torch.float16)]
)
def test_every_bit_pattern_is_widened_exactly(widen: Any, dtype: torch.dtype) -> None:
    """Infinities, subnormals and the sign of zero included; NaNs stay NaNs."""
    got, want = _widened(widen, PATTERNS), torch.from_numpy(PATTERNS).view(dtype).float().numpy()
    is_nan = np.isnan(want)
    assert is_nan.sum() in (2 * 127, 2 * 1023)
    assert np.isnan(got[is_nan]).all()
    assert np.array_equal(got[~is_nan].view(np.int32), want[~is_nan].view(np.int32))
