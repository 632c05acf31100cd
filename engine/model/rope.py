"""Rotary embeddings: the scaling that a checkpoint requires. Its tables are in `rotary_tables.py`."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import CheckpointError
from engine.model.config_fields import ConfigFields

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies theta ** (-2 i / head_dim), scaled for contexts longer than in pre-training.

    Attributes:
        rope_type: `default` does not scale; `linear` divides all frequencies by factor (arXiv:2306.15595); `llama3`
            divides those of long wavelengths and blends between the two bounds (Llama 3.1, arXiv:2407.21783); `yarn`
            blends between two indices of frequencies instead (arXiv:2309.00071); `longrope` divides each frequency by
            its own factor (arXiv:2402.13753).
        factor, original_max_position_embeddings: how many times longer, and the context of pre-training in tokens.
        low_freq_factor, high_freq_factor: of llama3; bounds of the blend, in turns within the original context.
        beta_slow, beta_fast, truncate: of yarn; the same bounds, and whether their indices are rounded.
        short_factors, long_factors: of longrope; for contexts up to the original length, and for longer ones.
        attention_factor: factor of cosines and sines, of yarn and longrope.
        rotated: part of each head that is rotated, its first dimensions.
        is_interleaved: whether the checkpoint rotates dimensions 2 i and 2 i + 1 as a pair, instead of i and i + half
            of those rotated.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    rotated: float = 1.0
    is_interleaved: bool = False

    @classmethod
    def from_fields(cls, fields: ConfigFields) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises: CheckpointError: the scaling is not supported, or a field is missing.
        """
        return cls.from_section(rope_section(fields), fields)

    @classmethod
    def from_section(cls, section: ConfigFields, fields: ConfigFields) -> "RopeConfig":
        """Reads a section of config.json; fields are those of the whole file, for what the section lacks.

        Raises: CheckpointError: the scaling is not supported, or a field is missing.
        """
        theta = section.number("rope_theta") if "rope_theta" in section else fields.number("rope_theta", 10000.0)
        rope_type = section.raw("rope_type", section.raw("type", "default"))
        if rope_type == "dynamic":
            raise section.error(
                "rope_type",
                "is 'dynamic', whose frequencies follow the longest request of a batch: an answer would depend on the "
                f"others. Remove it to serve max_position_embeddings, or use {', '.join(get_args(RopeType))}",
            )
        if rope_type not in get_args(RopeType):
            raise section.error("rope_type", f"is {rope_type!r}, supported are {', '.join(get_args(RopeType))}")
        source = section if "partial_rotary_factor" in section else fields
        rotated = source.number("partial_rotary_factor", 1.0)
        if rotated > 1:
            raise source.error("partial_rotary_factor", f"is {rotated}, expected at most 1")
        if rope_type == "default":
            return cls(theta, rotated=rotated)
        if rope_type == "linear":
            return cls(theta, rope_type, section.number("factor"), rotated=rotated)
        positions = fields.integer("max_position_embeddings")
        source = fields if "original_max_position_embeddings" in fields else section
        original = source.integer("original_max_position_embeddings", positions)
        if rope_type == "llama3":
            low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
            if low >= high:
                raise section.error("low_freq_factor", f"is {low}, expected less than high_freq_factor {high}")
            return cls(theta, rope_type, section.number("factor"), low, high, original, rotated=rotated)
        factor = section.number("factor", positions / original)
        if rope_type == "longrope":
            spread = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
            return cls(
                theta,
                rope_type,
                factor,
                original_max_position_embeddings=original,
                short_factors=_factors(section, "short_factor"),
                long_factors=_factors(section, "long_factor"),
                attention_factor=section.number("attention_factor", spread),
                rotated=rotated,
            )
        slow, fast = section.number("beta_slow", 1.0), section.number("beta_fast", 32.0)
        if slow >= fast:
            raise section.error("beta_slow", f"is {slow}, expected less than beta_fast {fast}")
        if theta <= 1:
            raise section.error("rope_theta", f"is {theta}, expected more than 1")
        temperature = _yarn_temperature(factor, 1.0)
        if section.raw("mscale", 0) and section.raw("mscale_all_dim", 0):  # 0 counts as absent
            temperature = _yarn_temperature(factor, section.number("mscale")) / _yarn_temperature(
                factor, section.number("mscale_all_dim")
            )
        return cls(
            theta,
            rope_type,
            factor,
            original_max_position_embeddings=original,
            beta_slow=slow,
            beta_fast=fast,
            truncate=section.flag("truncate", True),
            attention_factor=section.number("attention_factor", temperature * section.number("attn_factor", 1.0)),
            rotated=rotated,
        )

    def rotated_dims(self, head_dim: int) -> int:
        """Returns the number of dimensions of a head that are rotated."""
        return int(head_dim * self.rotated)

    def keeps_order(self, head_dim: int) -> bool:
        """Tells whether pairs are dimensions i and head_dim / 2 + i, which kernels rotate, in the checkpoint too."""
        return self.rotated_dims(head_dim) == head_dim and not self.is_interleaved

    def check(self, head_dim: int) -> None:
        """Checks that the rotation fits heads of a size.

        Raises: CheckpointError: an odd number of rotated dimensions, or another number of factors.
        """
        dims = self.rotated_dims(head_dim)
        if dims < 2 or dims % 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor is {self.rotated}, which rotates {dims} of {head_dim} dimensions; "
                "expected an even number: rotary embeddings rotate pairs"
            )
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.rope_type == "longrope" and len(factors) != dims // 2:
                raise CheckpointError(
                    f"config.json: {name} of the rotation has {len(factors)} numbers, heads with {dims} rotated "
                    f"dimensions require {dims // 2}"
                )

    def uses_long_factors(self, max_positions: int) -> bool:
        """Whether the long factors of longrope apply to all requests of a model with `max_positions` positions."""
        return max_positions > self.original_max_position_embeddings


def rope_section(fields: ConfigFields) -> ConfigFields:
    """Returns the section with the scaling: as in `transformers`, `rope_scaling` replaces `rope_parameters`.

    Raises: CheckpointError: both are there, and what only `rope_parameters` has would be lost.
    """
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if not old.names:
        return new
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in new and name not in old and name not in fields:
            raise new.error(
                name, f"is {new.raw(name)!r} and rope_scaling, which replaces rope_parameters, has none: move it there"
            )
    return old


def _factors(section: ConfigFields, name: str) -> tuple[float, ...]:
    values = section.raw(name)
    if not isinstance(values, list) or not all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf for value in values
    ):
        raise section.error(name, f"is {values!r}, expected a list of numbers > 0")
    return tuple(map(float, values))


def _yarn_temperature(factor: float, scale: float) -> float:
    """Returns the factor of cosines and sines (arXiv:2309.00071, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
