"""Weights in the formats of checkpoints, made of random ones, for the check of kernels."""

import torch

from kernels.grouped_weights import GroupedWeights
from kernels.microscaled_weights import MicroscaledWeights, NvFp4Weights
from kernels.scale_groups import MXFP4_GROUP_SIZE, NVFP4_GROUP_SIZE

_INTEGERS_GROUP_SIZE = 32


def microscaled(weight: torch.Tensor) -> MicroscaledWeights:
    """Makes codes of the bits of some weights [out, in], and scales that keep results near unit scale."""
    exponents = torch.arange(len(weight) * weight.shape[1] // MXFP4_GROUP_SIZE, device=weight.device) % 3 + 119
    return MicroscaledWeights(_codes(weight), exponents.view(len(weight), -1).to(torch.uint8))


def nvfp4(weight: torch.Tensor) -> NvFp4Weights:
    """Makes codes of the bits of some weights [out, in], and scales that keep results near unit scale."""
    num_groups = weight.shape[1] // NVFP4_GROUP_SIZE
    scales = (torch.arange(len(weight) * num_groups, device=weight.device) % 120).view(len(weight), -1)
    row_scales = torch.linspace(1, 2, len(weight), device=weight.device) / 512
    return NvFp4Weights(_codes(weight), scales.to(torch.uint8).view(torch.float8_e4m3fn), row_scales)


def _codes(weight: torch.Tensor) -> torch.Tensor:
    return (weight[:, ::2] * 64).to(torch.int32).to(torch.uint8)


def grouped(weight: torch.Tensor, num_bits: int) -> GroupedWeights:
    """Quantises weights [out, in] with a scale and an offset per group of inputs."""
    num_groups = max(1, weight.shape[1] // _INTEGERS_GROUP_SIZE)
    if weight.shape[1] % num_groups:
        num_groups = 1
    groups = weight.float().view(len(weight), num_groups, -1)
    lowest, highest = groups.aminmax(dim=2)
    scales = (highest - lowest) / (2**num_bits - 1)
    values = ((groups - lowest[..., None]) / scales[..., None]).round().to(torch.uint8)
    return GroupedWeights(values.view(weight.shape), scales, lowest, num_bits)
