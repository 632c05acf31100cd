"""Selection without a sort: a radix search over float bits for the cut of a top-k count or a top-p mass."""

from typing import TYPE_CHECKING

import numpy as np

from kernels.cpu.jit import strict_kernel

if TYPE_CHECKING:
    from kernels.cpu.arrays import Doubles, Floats, Words

_SIGN = np.uint32(0x80000000)


@strict_kernel
def fill_keys(values: "Floats", keys: "Words") -> None:
    """Converts floats to unsigned integers of the same order; equal floats, also 0.0 and -0.0, have equal keys.

    Args:
        values: [n], no NaN.
        keys: [n], written.
    """
    for i in range(len(values)):
        keys[i : i + 1].view(np.float32)[0] = values[i] + np.float32(0.0)  # -0.0 + 0.0 is 0.0
    for i in range(len(values)):
        bits = keys[i]
        keys[i] = ~bits if bits & _SIGN else bits | _SIGN


@strict_kernel
def select_key(keys: "Words", weights: "Doubles | None", target: float) -> tuple[np.uint32, float]:
    """Returns the largest key for which the weights of all keys >= it sum to the target.

    Three passes that fix 11, 11 and 10 bits of the key, each with one histogram of weights (radix select; the weighted
    form finds a top-p cut as the plain one finds a top-k cut). The fewer keys share the leading bits, the cheaper the
    later passes.

    Args:
        keys: [n] uint32.
        weights: [n] >= 0, or None: every key weighs 1.
        target: > 0. If all weights together stay below it, the key is below every key with weight.
    Returns: the key, and the weight of all keys above it (less than target).
    """
    histogram = np.empty(2048)
    prefix = np.uint32(0)
    above = 0.0
    for level in range(3):
        shift = np.uint32(21 if level == 0 else 10 if level == 1 else 0)
        num_bins = 1024 if level == 2 else 2048
        bin_mask = np.uint32(num_bins - 1)
        prefix_shift = np.uint32(21 if level == 1 else 10)
        histogram[:] = 0.0
        for i in range(len(keys)):
            if level == 0 or keys[i] >> prefix_shift == prefix:
                histogram[(keys[i] >> shift) & bin_mask] += 1.0 if weights is None else weights[i]
        chosen = num_bins - 1
        while chosen > 0 and above + histogram[chosen] < target:
            above += histogram[chosen]
            chosen -= 1
        prefix = np.uint32(prefix * num_bins + chosen)
    return prefix, above
