"""8-bit weights of a checkpoint, for families and layers without 8-bit products."""

import torch

from kernels.scale_groups import FP8_BLOCK_SIZE

FP8_DTYPE = torch.float8_e4m3fn


def has_block_scales(values: torch.Tensor, scales: torch.Tensor) -> bool:
    """Tells whether scales are per block of values [out, in]; otherwise they are per tensor or output channel."""
    return scales.ndim == 2 and scales.numel() > 1 and scales.shape != (len(values), 1)


def dequantized(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns values [out, in] float8_e4m3fn times their scales in fp32.

    Args:
        values: the stored weights.
        scales: per tensor, [] or [1]; per output channel, [out] or [out, 1]; or per block, [out / 128, in / 128], of
            which the last ones may be partial.
    """
    exact = values.float()
    if has_block_scales(values, scales):
        for index, of_rows in enumerate(scales.float()):
            rows = exact[index * FP8_BLOCK_SIZE : (index + 1) * FP8_BLOCK_SIZE]
            rows.mul_(of_rows.repeat_interleave(FP8_BLOCK_SIZE)[: exact.shape[1]])
        return exact
    return exact.mul_(scales.float().reshape(-1, 1))
