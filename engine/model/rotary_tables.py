"""Tables of rotary embeddings, which kernels index by position."""

import math

import torch

from engine.model.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns the radians per position of each pair of dimensions, [head_dim // 2] fp32."""
    # In fp32 like transformers, so that angles at high positions are identical.
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths  # within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 1: short wavelength, unscaled; 0: long, divided by factor
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotary_tables(
    rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (cos, sin) of position * frequency, each [max_positions, head_dim // 2] fp32."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(device), angles.sin().to(device)
