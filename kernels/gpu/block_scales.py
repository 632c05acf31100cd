"""Linear layers whose 8-bit weights have one scale per block of 128 x 128 (DeepSeek-V3, arXiv:2412.19437, section
3.3.2): the weights of a layer, as stored in the checkpoint.
"""

from dataclasses import dataclass

import torch

from kernels.gpu.float8 import as_fnuz
from kernels.gpu.targets import Target
from kernels.scale_groups import FP8_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class BlockScaledLinear:
    """Weights of one layer: weight[n, k] = values[n, k] * scales[n // 128, k // 128].

    Attributes:
        weight: [out, in] in the target's 8-bit float; as uint8 where it has none.
        scales: [out / 128, in / 128] fp32.
        bias: [out] in the model's dtype.
        dtype: of the model and of results.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.weight.shape[0]


def pack_block_scaled(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype, target: Target
) -> BlockScaledLinear:
    """Makes 8-bit weights of a checkpoint ready for `tiled_linear`.

    Args:
        values: [out, in] float8_e4m3fn; memory is shared unless the target has another 8-bit float.
        scales: [out / 128, in / 128].
        bias: [out], dtype.
        dtype: of the model.
        target: architecture of the GPU.
    """
    scales = scales.float().contiguous()
    if target.fp8_dtype is None:
        codes = values.contiguous().view(torch.uint8)
        blocks = codes.view(scales.shape[0], FP8_BLOCK_SIZE, scales.shape[1], FP8_BLOCK_SIZE)
        has_nan = ((blocks & 0x7F) == 0x7F).any(dim=3).any(dim=1)  # which the kernel could not tell from a number
        return BlockScaledLinear(codes, scales.masked_fill(has_nan, torch.nan), bias, dtype)
    if target.fp8_dtype is torch.float8_e4m3fnuz:
        values, scales = as_fnuz(values), 2 * scales
    return BlockScaledLinear(values.contiguous(), scales, bias, dtype)
