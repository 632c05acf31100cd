"""Soft cap of attention scores and logits: soft_cap * tanh(x / soft_cap) (Gemma 2, arXiv:2408.00118)."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.jit import exp_nonpositive, inline

if TYPE_CHECKING:
    from kernels.cpu.arrays import Floats


@inline
def cap_scores(x: "Floats", soft_cap: np.float32) -> None:
    """Caps all values in place; NaN stays NaN."""
    inverse = np.float32(1) / soft_cap
    for i in range(x.shape[0]):
        x[i] = soft_cap * _tanh(x[i] * inverse)


@inline
def _tanh(x: np.float32) -> np.float32:
    """Tanh of an fp32, relative error 3e-7. Unlike math.tanh it vectorises.

    Method: Cephes tanhf: an odd polynomial near zero, where 1 - exp would cancel, and exp elsewhere.
    """
    one = np.float32(1)
    e = exp_nonpositive(np.float32(-2) * abs(x))
    far = (one - e) / (one + e)
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    near = p * z * x + x
    if abs(x) < np.float32(0.625):
        return near
    return -far if x < 0 else far
