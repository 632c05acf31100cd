"""Tables of rotary embeddings, which kernels index by position."""

import math

import torch

from engine.model.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, is_long: bool = False) -> torch.Tensor:
    """Returns the radians per position of each pair of rotated dimensions, [head_dim // 2] fp32.

    Args:
        rope: the rotation.
        head_dim: rotated dimensions of a head.
        is_long: which factors of longrope apply.
    """
    # In fp32 and in the order of operations of transformers, so that angles at high positions are identical.
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * periods)
    frequencies = 1.0 / periods
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "yarn":
        blend = _unscaled_share(rope, head_dim)
        return 1.0 / (rope.factor * periods) * (1 - blend) + frequencies * blend
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths  # within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 1: short wavelength, unscaled; 0: long, divided by factor
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _unscaled_share(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns how much yarn keeps of each frequency, [head_dim // 2] fp32: 1 below one index, 0 from another on."""

    def index(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)


def rotary_tables(
    rope: RopeConfig | None, head_dim: int, max_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (cos, sin) of position * frequency, each [max_positions, head_dim // 2] fp32.

    Pairs that are not rotated come last and have cos 1 and sin 0; without a rotation, those are all.
    """
    num_pairs = 0 if rope is None else rope.rotated_dims(head_dim) // 2
    cos, sin = torch.ones(max_positions, head_dim // 2), torch.zeros(max_positions, head_dim // 2)
    if rope is not None:
        frequencies = inverse_frequencies(rope, 2 * num_pairs, is_long=rope.uses_long_factors(max_positions))
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos[:, :num_pairs], sin[:, :num_pairs] = (
            angles.cos() * rope.attention_factor,
            angles.sin() * rope.attention_factor,
        )
    return cos.to(device), sin.to(device)


def rotated_pairs_order(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns the order of dimensions, [head_dim] int64, that makes pairs i and head_dim / 2 + i of those rotated.

    The kernels rotate such pairs. A checkpoint pairs dimensions i and rotated / 2 + i, or 2 i and 2 i + 1.
    """
    half, pairs = head_dim // 2, rope.rotated_dims(head_dim) // 2
    rotated = torch.arange(2 * pairs)
    first, second = (rotated[::2], rotated[1::2]) if rope.is_interleaved else (rotated[:pairs], rotated[pairs:])
    return torch.cat((first, torch.arange(2 * pairs, half + pairs), second, torch.arange(half + pairs, head_dim)))
