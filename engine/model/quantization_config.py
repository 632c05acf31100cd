"""Reads the `quantization_config` of a checkpoint: which linear layers are quantised, and how."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from engine.model.config_fields import ConfigFields
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.int_weights import IntWeights
from engine.model.mlx import METHOD as MLX
from engine.model.mlx import read_mlx
from engine.model.modelopt import read_modelopt
from engine.model.module_patterns import MAX_NAMES, num_names
from engine.model.mxfp4 import Mxfp4Weights

QuantizedWeights: TypeAlias = Fp8Weights | IntWeights | GgufWeights | Mxfp4Weights | Fp4Weights

_OfTensors: TypeAlias = Fp8Weights | IntWeights | Fp4Weights

_MAX_GROUPS = 64
_OF_WEIGHTS = ("weight_input", "weight_output")
"""Where transforms are part of the stored weights."""
_METHODS: dict[str, Callable[[ConfigFields], QuantizedWeights]] = {
    "fp8": Fp8Weights.from_fp8,
    "gptq": IntWeights.from_gptq,
    "awq": IntWeights.from_awq,
    "auto-round": IntWeights.from_auto_round,
    "mxfp4": Mxfp4Weights.from_section,
    "modelopt": read_modelopt,
}
_OTHER_NAMES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"}
_SUPPORTED = ", ".join((*_METHODS, "compressed-tensors"))
_INSTEAD = "serve the checkpoint that was quantised, with --quantization int8 on a CPU, fp8 on a GPU"


def read_quantization_config(fields: ConfigFields) -> QuantizedWeights | None:
    """Returns None if the checkpoint is not quantised.

    Raises: CheckpointError: the quantisation is not supported.
    """
    if "quantization_config" not in fields:
        return None
    stored = fields.raw("quantization_config")
    if isinstance(stored, GgufWeights):
        return stored
    section = stored if isinstance(stored, ConfigFields) else fields.section("quantization_config")
    method = section.raw("quant_method", "absent")
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method == MLX:
        return read_mlx(section)
    if isinstance(method, str) and (reader := _METHODS.get(_OTHER_NAMES.get(method, method))) is not None:
        return reader(section)
    raise section.error("quant_method", f"is {method!r}, supported are {_SUPPORTED}; {_INSTEAD}")


def _compressed_tensors(section: ConfigFields) -> QuantizedWeights:
    """Reads the groups, which must have one format; each names modules that it is of."""
    _refuse_rotated_inputs(section)
    groups = section.section("config_groups")
    if not 1 <= len(groups.names) <= _MAX_GROUPS:
        raise section.error("config_groups", f"has {len(groups.names)} groups, supported are 1 to {_MAX_GROUPS}")
    found = [_of_group(section, groups.section(name)) for name in groups.names]
    first = replace(found[0], only=None)
    for name, other in zip(groups.names, found, strict=True):
        if replace(other, only=None) != first:
            raise section.error(
                "config_groups",
                f"has different formats, {_described(groups, groups.names[0])} and {_described(groups, name)}, "
                f"supported is one; {_INSTEAD}",
            )
    only = [weights.only for weights in found]
    of_some = None if None in only else tuple(pattern for patterns in only for pattern in patterns or ())
    if of_some is not None and (number := num_names(of_some)) > MAX_NAMES:
        raise section.error("config_groups", f"has {number} targets, at most {MAX_NAMES} are allowed")
    return replace(found[0], only=of_some)


def _refuse_rotated_inputs(section: ConfigFields) -> None:
    """Refuses transforms of inputs, outputs or attention, which steps would compute; stored weights have their own."""
    transforms = section.section("transform_config").section("config_groups")
    for name in transforms.names:
        uses = transforms.section(name).raw("apply", [])
        if not isinstance(uses, list):
            raise transforms.error(name, f"has apply {uses!r}, expected a list")
        locations = [use.get("location") if isinstance(use, dict) else use for use in uses]
        if others := [place for place in locations if place not in _OF_WEIGHTS]:
            raise transforms.error(name, f"rotates {others[0]!r}, supported are {', '.join(_OF_WEIGHTS)}; {_INSTEAD}")


def _of_group(section: ConfigFields, group: ConfigFields) -> _OfTensors:
    targets = group.raw("targets", ["Linear"])
    if not isinstance(targets, list) or not targets or not all(map(_is_target, targets)):
        raise group.error(
            "targets", f"is {targets!r}, supported are 'Linear', names of modules, and patterns after 're:'"
        )
    weights = group.section("weights")
    kind, num_bits = weights.raw("type", "absent"), weights.raw("num_bits", 0)
    if kind == "int":
        return IntWeights.from_compressed_tensors(section, group)
    if (kind, num_bits) == ("float", 4):
        return Fp4Weights.from_compressed_tensors(section, group)
    if (kind, num_bits) != ("float", 8):
        raise weights.error(
            "type",
            f"is {kind!r} with num_bits {num_bits!r}, supported are 'float' with num_bits 4 or 8, 'int' with num_bits "
            f"4 or 8; {_INSTEAD}",
        )
    return Fp8Weights.from_compressed_tensors(section, group)


def _described(groups: ConfigFields, group_name: str) -> str:
    """Returns the name of a group, and what distinguishes its format."""
    group = groups.section(group_name)
    weights = group.section("weights")
    names = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder")
    inputs = group.section("input_activations")
    settings = ", ".join(
        f"{what}{name} {part.raw(name)!r}"
        for what, part in (("", weights), ("input ", inputs))
        for name in names
        if name in part
    )
    return f"{group_name} ({settings})"


def _is_target(target: object) -> bool:
    """Whether a target is supported: of the classes of modules, which have no dots, linear layers are."""
    return isinstance(target, str) and (target == "Linear" or target.startswith("re:") or "." in target)
