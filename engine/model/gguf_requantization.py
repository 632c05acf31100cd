"""Blocks whose numbers are no integers with a scale: dequantised by llama.cpp's package `gguf`, and stored as Q8_0.

Their types have tables of hundreds of vectors (IQ1, IQ2, IQ3) or digits of other bases (TQ), which no kernel here has.
"""

import numpy as np
import torch

from engine.model.gguf_file import QUANTIZED_TYPES

_GROUP = QUANTIZED_TYPES["Q8_0"].numbers


def dequantized(kind: str, data: torch.Tensor) -> torch.Tensor:
    """Returns numbers [rows, numbers] fp32 of blocks.

    Args:
        kind: name of a type of `REQUANTIZED_TYPES`.
        data: [rows, bytes] uint8: whole blocks.
    """
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a scale may be infinite, which the caller reports
        numbers = dequantize(data.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))


def as_q8_0(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the blocks of numbers [rows, numbers] fp32 in Q8_0, [rows, bytes] uint8.

    Each 32 have the smallest scale in fp16 with which none is beyond 127, so that rounding changes a number by half of
    it at most. The scale is infinite if there is none.
    """
    groups = numbers.reshape(-1, _GROUP)
    exact = groups.abs().amax(dim=1, keepdim=True) / 127
    scales = exact.half()
    scales = torch.where(scales.float() < exact, torch.nextafter(scales, torch.full_like(scales, torch.inf)), scales)
    values = torch.where(scales > 0, groups / scales.float(), 0).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), dim=1)
    return blocks.view(len(numbers), -1)
