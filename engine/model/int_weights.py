"""Linear layers of a checkpoint in integers of 4 or 8 bits, with a scale and often a zero point per group of inputs.

Three tools write them: GPTQ (arXiv:2210.17323; AutoGPTQ, GPTQModel), AWQ (arXiv:2306.00978; AutoAWQ) and llm-compressor
("compressed-tensors"). They differ in how integers are packed into words, see `engine.model.int_matrix`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import is_selected, module_patterns, skipped_modules, targeted_modules

Layout = Literal["gptq", "awq", "packed", "int8"]

_WORD_BITS = 32
_GPTQ_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class IntWeights:
    """Which linear layers of a checkpoint are stored in integers, and how.

    Attributes:
        layout: of the tensors: "packed" and "int8" are those of compressed-tensors.
        num_bits: 4 or 8.
        group_size: inputs that share a scale; None: all.
        exceptions: patterns for the names of the layers that are not quantised.
        only: patterns for the names of those that are; None: all others.
        has_zero_points: whether zero points are stored; always for gptq and awq.
        stored_zero: what is added to stored zero points: 1 in the first format of GPTQ.
        has_input_order: whether groups are of inputs in another order, which `g_idx` tells.
        quantizes_inputs: whether inputs are meant to be quantised to int8, with a scale per token.
    """

    layout: Layout
    num_bits: int
    group_size: int | None
    exceptions: tuple[re.Pattern[str], ...] = ()
    only: tuple[re.Pattern[str], ...] | None = None
    has_zero_points: bool = True
    stored_zero: int = 0
    has_input_order: bool = False
    quantizes_inputs: bool = False

    @property
    def per_word(self) -> int:
        """Integers of a 32-bit word."""
        return 1 if self.layout == "int8" else _WORD_BITS // self.num_bits

    @classmethod
    def from_gptq(cls, section: ConfigFields) -> "IntWeights":
        """Reads a `quantization_config` with quant_method "gptq".

        Raises: CheckpointError: a field is not supported.
        """
        format_field = "checkpoint_format" if "checkpoint_format" in section else "format"
        stored = section.raw(format_field, "gptq")
        if stored not in _GPTQ_FORMATS:
            raise section.error(format_field, f"is {stored!r}, supported are {', '.join(_GPTQ_FORMATS)}")
        _refuse_head(section)
        only = "modules_in_block_to_quantize"
        return cls(
            layout="gptq",
            num_bits=_num_bits(section, "bits", (4, 8)),
            group_size=_group_size(section, "group_size"),
            exceptions=skipped_modules(section, "dynamic"),
            only=module_patterns(section, only) if only in section else None,
            stored_zero=1 if stored == "gptq" else 0,
            has_input_order=True,  # g_idx is there with desc_act and without
        )

    @classmethod
    def from_awq(cls, section: ConfigFields) -> "IntWeights":
        """Reads a `quantization_config` with quant_method "awq".

        Raises: CheckpointError: a field is not supported.
        """
        version = section.raw("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise section.error("version", f"is {version!r}, supported is 'gemm'")
        _refuse_head(section)
        field = "group_size" if "group_size" in section else "q_group_size"
        return cls(
            layout="awq",
            num_bits=_num_bits(section, "bits" if "bits" in section else "w_bit", (4,)),
            group_size=_group_size(section, field),
            exceptions=module_patterns(section, "modules_to_not_convert"),
        )

    @classmethod
    def from_compressed_tensors(cls, section: ConfigFields, group: ConfigFields) -> "IntWeights":
        """Reads a `quantization_config` of llm-compressor, and the one group in its `config_groups`.

        Raises: CheckpointError: a field is not supported.
        """
        weights, inputs = group.section("weights"), group.section("input_activations")
        stored = group.raw("format", section.raw("format", "pack-quantized"))
        if stored not in ("pack-quantized", "int-quantized"):
            raise section.error("format", f"is {stored!r}, supported with integers are pack-quantized, int-quantized")
        is_packed = stored == "pack-quantized"
        num_bits = _num_bits(weights, "num_bits", (4, 8) if is_packed else (8,))
        strategy = weights.raw("strategy", "tensor")
        if strategy not in ("group", "channel"):
            raise weights.error("strategy", f"is {strategy!r}, supported with integers are group, channel")
        if inputs.names:
            kind = inputs.raw("type", "int"), inputs.raw("num_bits", 8), inputs.raw("strategy", "token")
            if kind != ("int", 8, "token") or not inputs.flag("symmetric", True):
                raise group.error(
                    "input_activations",
                    f"are {kind[0]!r} with num_bits {kind[1]!r}, strategy {kind[2]!r} and symmetric "
                    f"{inputs.raw('symmetric', True)!r}, supported beside integers are 'int', 8, 'token' and true",
                )
        if "kv_cache_scheme" in section:
            raise section.error("kv_cache_scheme", "is not supported with weights of integers")
        return cls(
            layout="packed" if is_packed else "int8",
            num_bits=num_bits,
            group_size=_group_size(weights, "group_size") if strategy == "group" else None,
            exceptions=module_patterns(section, "ignore"),
            only=targeted_modules(group),
            has_zero_points=not weights.flag("symmetric", True),
            has_input_order=weights.raw("actorder", None) in ("group", "dynamic", True),  # names of the same
            quantizes_inputs=bool(inputs.names),
        )

    def form(self, names: Iterable[str]) -> tuple[int, int | None]:  # noqa: ARG002 - all layers have the same
        """Returns bits of an integer and inputs of a group; None: all."""
        return self.num_bits, self.group_size

    def holds(self, module: str) -> bool:
        """Whether a linear layer is quantised; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return is_selected(module, self.exceptions, self.only)


def _num_bits(section: ConfigFields, field: str, supported: tuple[int, ...]) -> int:
    num_bits = section.integer(field)
    if num_bits not in supported:
        raise section.error(field, f"is {num_bits}, supported is {' or '.join(map(str, supported))}")
    return num_bits


def _group_size(section: ConfigFields, field: str) -> int | None:
    """Reads inputs per group; -1 stands for all."""
    if section.raw(field) == -1:
        return None
    size = section.integer(field)
    if size % 16:
        raise section.error(field, f"is {size}, expected -1 or a multiple of 16")
    return size


def _refuse_head(section: ConfigFields) -> None:
    if section.flag("lm_head", False):
        raise section.error("lm_head", "is true: a quantised output head is not supported")
