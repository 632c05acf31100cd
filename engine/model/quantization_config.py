"""Reads the `quantization_config` of a checkpoint: which linear layers are quantised, and how."""

from collections.abc import Callable
from typing import TypeAlias

from engine.model.config_fields import ConfigFields
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.int_weights import IntWeights
from engine.model.mxfp4 import Mxfp4Weights

QuantizedWeights: TypeAlias = Fp8Weights | IntWeights | GgufWeights | Mxfp4Weights

_METHODS: dict[str, Callable[[ConfigFields], QuantizedWeights]] = {
    "fp8": Fp8Weights.from_fp8,
    "gptq": IntWeights.from_gptq,
    "awq": IntWeights.from_awq,
    "mxfp4": Mxfp4Weights.from_section,
}
_SUPPORTED = ", ".join((*_METHODS, "compressed-tensors"))
_INSTEAD = "serve the checkpoint that was quantised, with --quantization int8 on a CPU, fp8 on a GPU"


def read_quantization_config(fields: ConfigFields) -> QuantizedWeights | None:
    """Returns None if the checkpoint is not quantised.

    Raises: CheckpointError: the quantisation is not supported.
    """
    if "quantization_config" not in fields:
        return None
    if isinstance(stored := fields.raw("quantization_config"), GgufWeights):
        return stored
    section = fields.section("quantization_config")
    method = section.raw("quant_method", "absent")
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if not isinstance(method, str) or method not in _METHODS:
        raise section.error("quant_method", f"is {method!r}, supported are {_SUPPORTED}; {_INSTEAD}")
    return _METHODS[method](section)


def _compressed_tensors(section: ConfigFields) -> QuantizedWeights:
    groups = section.section("config_groups")
    if len(groups.names) != 1:
        raise section.error("config_groups", f"has {len(groups.names)} groups, supported is one")
    group = groups.section(groups.names[0])
    targets = group.raw("targets", ["Linear"])
    if not isinstance(targets, list) or not targets or not all(map(_is_target, targets)):
        raise group.error(
            "targets", f"is {targets!r}, supported are 'Linear', names of modules, and patterns after 're:'"
        )
    weights = group.section("weights")
    kind, num_bits = weights.raw("type", "absent"), weights.raw("num_bits", 0)
    if kind == "int":
        return IntWeights.from_compressed_tensors(section, group)
    if (kind, num_bits) != ("float", 8):
        raise weights.error(
            "type",
            f"is {kind!r} with num_bits {num_bits!r}, supported are 'float' with num_bits 8, 'int' with num_bits 4 or "
            f"8; {_INSTEAD}",
        )
    return Fp8Weights.from_compressed_tensors(section, group)


def _is_target(target: object) -> bool:
    """Whether a target is supported: of the classes of modules, which have no dots, linear layers are."""
    return isinstance(target, str) and (target == "Linear" or target.startswith("re:") or "." in target)
