"""Linear layers of a checkpoint in integers, with a scale and often a zero point or an offset per group of inputs.

Four tools write them: GPTQ (arXiv:2210.17323; AutoGPTQ, GPTQModel), AWQ (arXiv:2306.00978; AutoAWQ) and llm-compressor
("compressed-tensors") with 4 or 8 bits, and MLX (`engine.model.mlx`) with 2 to 8. They differ in how integers are
packed into words, see `engine.model.int_matrix`. AutoRound (arXiv:2309.05516) writes the layouts of the first two.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import ModulePattern, is_selected, module_patterns, skipped_modules, targeted_modules
from engine.model.text_part import stored_names

Layout = Literal["gptq", "awq", "packed", "int8", "mlx"]

_WORD_BITS = 32
_AUTO_ROUND_FORMATS: dict[str, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1), "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0), "auto_round:awq": ("awq", 0),
}  # fmt: skip
"""Layouts of AutoRound, and what is added to stored zero points."""
_BLOCKS = ("block_name_to_quantize", "to_quant_block_names", "quant_block_list")
_UNQUANTISED_BITS = 16
_OF_LAYERS = {"bits": None, "group_size": None, "data_type": "int"}
"""Settings that AutoRound may have for single layers, with their defaults; zero points are stored in any case."""
_MODULE_NAME = re.compile(r"[\w.]+")
_GPTQ_FORMATS = ("gptq", "gptq_v2")


_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)$")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def mlx_name(module: str) -> str:
    """Returns what MLX calls a projection of an expert: that of all experts of its layer; others unchanged."""
    return _EXPERT.sub(lambda found: f".switch_mlp.{_OF_MIXTRAL.get(found[1], found[1])}", module)


@dataclass(frozen=True, slots=True)
class IntWeights:
    """Which linear layers of a checkpoint are stored in integers, and how.

    Attributes:
        layout: of the tensors: "packed" and "int8" are those of compressed-tensors.
        num_bits: of integers in memory: 4, 5, 6 or 8.
        group_size: inputs that share a scale; None: all.
        exceptions: patterns for the names of the layers that are not quantised.
        only: patterns for the names of those that are; None: all others.
        has_zero_points: whether zero points are stored, or offsets; always for gptq, awq and mlx.
        stored_zero: what is added to stored zero points: 1 in the first format of GPTQ.
        has_input_order: whether groups are of inputs in another order, which `g_idx` tells.
        quantizes_inputs: whether inputs are meant to be quantised to int8, with a scale per token.
        stored_bits: of integers in the checkpoint; None: num_bits.
        has_vocabulary: whether embedding and output head are quantised too.
        of_layers: layers with integers or groups of their own, by their names, which a checkpoint with images has too.
    """

    layout: Layout
    num_bits: int
    group_size: int | None
    exceptions: tuple[ModulePattern, ...] = ()
    only: tuple[ModulePattern, ...] | None = None
    has_zero_points: bool = True
    stored_zero: int = 0
    has_input_order: bool = False
    quantizes_inputs: bool = False
    stored_bits: int | None = None
    has_vocabulary: bool = False
    of_layers: Mapping[str, "IntWeights"] = dataclasses.field(default_factory=dict)

    @property
    def per_word(self) -> int:
        """Integers of a 32-bit word; 1 where rows of a matrix have any number: of int8 and mlx."""
        return 1 if self.layout in ("int8", "mlx") else _WORD_BITS // self.num_bits

    @property
    def bits_in_file(self) -> int:
        """Bits of an integer in the checkpoint."""
        return self.stored_bits or self.num_bits

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
    def from_auto_round(cls, section: ConfigFields) -> "IntWeights":
        """Reads a `quantization_config` with quant_method "auto-round".

        Raises: CheckpointError: a field is not supported.
        """
        packing = section.raw("packing_format", "auto_round:auto_gptq")
        if not isinstance(packing, str) or packing not in _AUTO_ROUND_FORMATS:
            raise section.error("packing_format", f"is {packing!r}, supported are {', '.join(_AUTO_ROUND_FORMATS)}")
        layout, stored_zero = _AUTO_ROUND_FORMATS[packing]
        if (kind := section.raw("data_type", "int")) != "int":
            raise section.error("data_type", f"is {kind!r}, supported is 'int'")
        if (bits := section.raw("act_bits", _UNQUANTISED_BITS)) != _UNQUANTISED_BITS:
            raise section.error("act_bits", f"is {bits!r}, supported is {_UNQUANTISED_BITS}: inputs are not quantised")
        if rotation := section.raw("rotation_config", None):
            raise section.error("rotation_config", f"is {rotation!r}: layers that are rotated are not supported")
        for field in ("lm_head", "quant_lm_head"):
            _refuse_head(section, field)
        num_bits = _num_bits(section, "bits", (4, 8) if layout == "gptq" else (4,))
        group_size = _group_size(section, "group_size")
        return cls(
            layout=layout,
            num_bits=num_bits,
            group_size=group_size,
            exceptions=_layers_in_16_bits(section) + module_patterns(section, "modules_to_not_convert"),
            only=_blocks(section),
            stored_zero=stored_zero,
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

    def holds(self, module: str) -> bool:
        """Whether a linear layer is quantised; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return is_selected(self._name_in_list(module), self.exceptions, self.only)

    def of(self, module: str) -> "IntWeights":
        """Returns how a layer is stored."""
        if not self.of_layers:
            return self
        names = stored_names(self._name_in_list(module))
        return next((self.of_layers[name] for name in names if name in self.of_layers), self)

    def _name_in_list(self, module: str) -> str:
        """Returns what lists of modules call a layer: MLX has one name for a projection of all experts."""
        return module if self.layout != "mlx" else mlx_name(module)

    def joint(self, modules: Collection[str]) -> "IntWeights":
        """Returns how memory has the matrix that layers form: in the most bits and the smallest groups of them."""
        own = [self.of(module) for module in modules]
        sizes = [one.group_size for one in own if one.group_size is not None]
        return replace(self, num_bits=max(one.num_bits for one in own), group_size=min(sizes, default=None))

    def packed_bytes(self, names: Collection[str], num_rows: int, num_columns: int, *, is_compact: bool) -> int:  # noqa: ARG002 - one form
        """Returns the bytes in memory of the matrix that layers form: integers, and two numbers per group in fp32.

        A CPU keeps these numbers in fewer bytes if their values allow it.
        """
        joint = self.joint(names)
        num_groups = num_columns // (joint.group_size or num_columns)
        return num_rows * (num_columns * joint.num_bits // 8 + 8 * num_groups)


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


def _refuse_head(section: ConfigFields, field: str = "lm_head") -> None:
    if section.flag(field, False):
        raise section.error(field, "is true: a quantised output head is not supported")


def _blocks(section: ConfigFields) -> tuple[ModulePattern, ...] | None:
    """Reads which blocks AutoRound has quantised: names, in a list or with commas; None: all."""
    field = next((name for name in _BLOCKS if name in section), None)
    if field is None:
        return None
    if isinstance(names := section.raw(field), str):
        section = section.replaced({field: [name.strip() for name in names.split(",")]})
    return module_patterns(section, field)


def _layers_in_16_bits(section: ConfigFields) -> tuple[ModulePattern, ...]:
    """Reads AutoRound's settings of single layers, named or by a pattern, which may leave some in 16 bits.

    Raises: CheckpointError: a layer has other settings than 16 bits or those of all.
    """
    settings = section.section("extra_config")
    names = []
    for name in settings.names:
        own = settings.section(name)
        if own.integer("bits", section.raw("bits")) >= _UNQUANTISED_BITS:
            is_name = _MODULE_NAME.fullmatch(name) is not None
            names.append(name if is_name else f"re:{'' if name.startswith(('.*', '^')) else '.*'}{name}")
            continue
        if "lm_head" in name:
            raise settings.error(name, f"has {own.raw('bits')} bits: a quantised output head is not supported")
        for field, default in _OF_LAYERS.items():
            if field in own and own.raw(field) != (of_all := section.raw(field, default)):
                raise settings.error(
                    name, f"has {field} {own.raw(field)!r}, supported are {of_all!r}, as of all layers, and 16 bits"
                )
    return module_patterns(section.replaced({"extra_config": names}), "extra_config")
