"""Experts of a checkpoint in MXFP4, as gpt-oss is published; see `kernels.microscaled_weights`."""

from collections.abc import Collection
from dataclasses import dataclass

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import ModulePattern, module_patterns
from kernels.scale_groups import MXFP4_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Mxfp4Weights:
    """Which experts of a checkpoint are stored in MXFP4: those of all layers but for exceptions.

    Attributes:
        exceptions: patterns for the names of other modules.
    """

    exceptions: tuple[ModulePattern, ...] = ()
    num_bits = 4
    has_microscaled_experts = True

    @classmethod
    def from_section(cls, section: ConfigFields) -> "Mxfp4Weights":
        """Reads a `quantization_config` with quant_method "mxfp4".

        Raises: CheckpointError: a field is not supported.
        """
        return cls(module_patterns(section, "modules_to_not_convert"))

    def holds(self, module: str) -> bool:
        """Whether a layer is in MXFP4; `module` is its name, such as `model.layers.0.mlp.experts.down_proj`."""
        return ".experts." in module and not any(exception.match(module) for exception in self.exceptions)

    def packed_bytes(self, _names: Collection[str], num_rows: int, num_columns: int, *, is_compact: bool) -> int:  # noqa: ARG002 - one form
        """Returns the bytes in memory of the matrices of experts: codes of 4 bits, and a byte per group."""
        return num_rows * (num_columns // 2 + num_columns // MXFP4_GROUP_SIZE)
