"""Linear layers of a checkpoint in 4-bit floats, with an 8-bit float as the scale of a few inputs.

ModelOpt writes them with `quant_method` "modelopt", llm-compressor with "compressed-tensors"; `engine.model.fp4_matrix`
tells how their tensors differ. Inputs of products are not rounded, so scales for them (`input_scale`,
`input_global_scale`) are not used.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import ModulePattern, is_selected, module_patterns, targeted_modules
from kernels.scale_groups import MXFP4_GROUP_SIZE, NVFP4_GROUP_SIZE

Layout = Literal["modelopt", "nvfp4", "mxfp4"]

_OF_FORMAT: dict[str, tuple[Layout, str]] = {
    "nvfp4-pack-quantized": ("nvfp4", "tensor_group"),
    "mxfp4-pack-quantized": ("mxfp4", "group"),
}
"""Layouts of compressed-tensors, and the strategy of each."""


@dataclass(frozen=True, slots=True)
class Fp4Weights:
    """Which linear layers of a checkpoint are stored in 4-bit floats, and how.

    Attributes:
        layout: of the tensors: "modelopt" is its NVFP4; "nvfp4" and "mxfp4" are those of compressed-tensors.
        exceptions: patterns for the names of the layers that are not.
        only: patterns for the names of the layers that are; None: all others.
    """

    layout: Layout
    exceptions: tuple[ModulePattern, ...] = ()
    only: tuple[ModulePattern, ...] | None = None
    num_bits = 4

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return MXFP4_GROUP_SIZE if self.layout == "mxfp4" else NVFP4_GROUP_SIZE

    @property
    def format_name(self) -> str:
        """Of the numbers, for messages."""
        return "mxfp4" if self.layout == "mxfp4" else "nvfp4"

    @property
    def has_microscaled_experts(self) -> bool:
        """Whether experts are in MXFP4, which operations take as it is."""
        return self.layout == "mxfp4"

    @classmethod
    def from_modelopt(cls, section: ConfigFields, exceptions: tuple[ModulePattern, ...]) -> "Fp4Weights":
        """Reads the settings of ModelOpt's NVFP4.

        Raises: CheckpointError: a field is not supported.
        """
        _check_group_size(section, NVFP4_GROUP_SIZE)
        return cls("modelopt", exceptions)

    @classmethod
    def from_compressed_tensors(cls, section: ConfigFields, group: ConfigFields) -> "Fp4Weights":
        """Reads a `quantization_config` of llm-compressor, and a group in its `config_groups`.

        Raises: CheckpointError: a field is not supported.
        """
        stored = group.raw("format", section.raw("format", "absent"))
        if not isinstance(stored, str) or stored not in _OF_FORMAT:
            raise section.error("format", f"is {stored!r}, supported with 4-bit floats are {', '.join(_OF_FORMAT)}")
        layout, expected = _OF_FORMAT[stored]
        weights, inputs = group.section("weights"), group.section("input_activations")
        if (strategy := weights.raw("strategy", expected)) != expected:
            raise weights.error("strategy", f"is {strategy!r}, supported with {stored} is {expected}")
        if not weights.flag("symmetric", True):
            raise weights.error("symmetric", "is false, supported is true")
        if inputs.names and (kind := inputs.raw("type", "absent")) != "float":
            raise inputs.error("type", f"is {kind!r}, supported beside 4-bit floats is 'float'")
        found = cls(layout, module_patterns(section, "ignore"), targeted_modules(group))
        _check_group_size(weights, found.group_size)
        return found

    def holds(self, module: str) -> bool:
        """Whether a linear layer is in 4 bits; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return is_selected(module, self.exceptions, self.only)

    def is_microscaled(self, names: Collection[str]) -> bool:
        """Whether the matrix that layers form is an expert's in MXFP4, which operations take as it is."""
        return self.layout == "mxfp4" and all(".experts." in name for name in names)

    def packed_bytes(self, names: Collection[str], num_rows: int, num_columns: int, *, is_compact: bool) -> int:
        """Returns the bytes in memory of the matrix that layers form.

        is_compact: whether the codes stay as they are, as on a CPU. Otherwise weights are integers of 8 bits with a
            scale and an offset per group in fp32, but for experts in MXFP4.
        """
        num_weights, num_groups = num_rows * num_columns, num_rows * num_columns // self.group_size
        if is_compact:
            return num_weights // 2 + num_groups + 4 * num_rows
        return num_weights // 2 + num_groups if self.is_microscaled(names) else num_weights + 8 * num_groups


def _check_group_size(section: ConfigFields, expected: int) -> None:
    if (size := section.raw("group_size", expected)) != expected:
        raise section.error("group_size", f"is {size!r}, supported with 4-bit floats is {expected}")
