"""Rotary embeddings: the scaling that a checkpoint requires. Its tables are in `rotary_tables.py`."""

from dataclasses import dataclass
from typing import Literal, get_args

from engine.model.config_fields import ConfigFields

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies theta ** (-2 i / head_dim), scaled for contexts longer than in pre-training.

    Attributes:
        rope_type: `default` does not scale; `linear` divides all frequencies by factor (arXiv:2306.15595); `llama3`
            divides those of long wavelengths and blends between the two bounds (Llama 3.1, arXiv:2407.21783).
        factor, low_freq_factor, high_freq_factor, original_max_position_embeddings: values of the checkpoint;
            defaults if the type does not use them.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    @classmethod
    def from_fields(cls, fields: ConfigFields) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises: CheckpointError: the scaling is not supported, or a field is missing.
        """
        section = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
        theta = section.number("rope_theta") if "rope_theta" in section else fields.number("rope_theta", 10000.0)
        rope_type = section.raw("rope_type", section.raw("type", "default"))
        if rope_type not in get_args(RopeType):
            raise section.error("rope_type", f"is {rope_type!r}, supported are {', '.join(get_args(RopeType))}")
        rotated = section.raw("partial_rotary_factor", fields.raw("partial_rotary_factor", 1.0))
        if rotated != 1.0:
            raise section.error("partial_rotary_factor", f"is {rotated!r}, supported is 1.0")
        if rope_type == "default":
            return cls(theta)
        if rope_type == "linear":
            return cls(theta, rope_type, section.number("factor"))
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise section.error("low_freq_factor", f"is {low}, expected less than high_freq_factor {high}")
        return cls(
            theta, rope_type, section.number("factor"), low, high, section.integer("original_max_position_embeddings")
        )
