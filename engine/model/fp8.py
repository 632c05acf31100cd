"""Checkpoints with linear layers in 8-bit floats: reads their `quantization_config`.

Supported are the two formats that tools write for W8A8: `quant_method` "fp8" (AutoFP8, transformers) and
"compressed-tensors" (llm-compressor). Weights are float8_e4m3fn with one scale per tensor or per output channel.
Activations always get one scale per token, computed from its values. This is at least as exact as a static scale for a
whole tensor, so the activation scales of static schemes are not used.
"""

import re
from dataclasses import dataclass

import torch

from engine.model.config_fields import ConfigFields

FP8_DTYPE = torch.float8_e4m3fn

_MAX_EXCEPTIONS = 4096
_MAX_REPEATS = 4
_REPEAT = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")

_METHODS = ("fp8", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Which linear layers of a checkpoint are stored in 8 bits.

    Attributes:
        exceptions: patterns for the names of the layers that are not.
    """

    exceptions: tuple[re.Pattern[str], ...]

    @classmethod
    def from_fields(cls, fields: ConfigFields) -> "Fp8Weights | None":
        """Reads `quantization_config`; returns None if there is none.

        Raises: CheckpointError: the quantisation is not supported.
        """
        if "quantization_config" not in fields:
            return None
        section = fields.section("quantization_config")
        method = section.raw("quant_method", "absent")
        if method == "fp8":
            return cls._from_fp8(section)
        if method == "compressed-tensors":
            return cls._from_compressed_tensors(section)
        raise section.error("quant_method", f"is {method!r}, supported are {', '.join(_METHODS)}")

    @classmethod
    def _from_fp8(cls, section: ConfigFields) -> "Fp8Weights":
        if "weight_block_size" in section:
            raise section.error(
                "weight_block_size",
                f"is {section.raw('weight_block_size')!r}, supported are one scale per tensor or per output channel",
            )
        scheme = section.raw("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise section.error("activation_scheme", f"is {scheme!r}, supported are dynamic, static")
        return cls(_exceptions(section, "modules_to_not_convert") + _exceptions(section, "ignored_layers"))

    @classmethod
    def _from_compressed_tensors(cls, section: ConfigFields) -> "Fp8Weights":
        if "kv_cache_scheme" in section:
            raise section.error("kv_cache_scheme", "is set, supported is none: --kv-cache-dtype sets the dtype")
        groups = section.section("config_groups")
        if len(groups.names) != 1:
            raise section.error("config_groups", f"has {len(groups.names)} groups, supported is one")
        group = groups.section(groups.names[0])
        if (targets := group.raw("targets", ["Linear"])) != ["Linear"]:
            raise group.error("targets", f"is {targets!r}, supported is ['Linear']")
        weights, activations = group.section("weights"), group.section("input_activations")
        for part in (weights, activations):
            _check_float8(part)
        strategy = weights.raw("strategy", "tensor")
        if strategy not in ("tensor", "channel"):
            raise weights.error("strategy", f"is {strategy!r}, supported are tensor, channel")
        strategy = activations.raw("strategy", "tensor")
        if strategy not in ("token", "tensor"):
            raise activations.error("strategy", f"is {strategy!r}, supported are token, tensor")
        return cls(_exceptions(section, "ignore"))

    def holds(self, module: str) -> bool:
        """Whether a linear layer is stored in 8 bits; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return not any(exception.match(module) for exception in self.exceptions)


def _check_float8(part: ConfigFields) -> None:
    kind, num_bits = part.raw("type", "absent"), part.raw("num_bits", 0)
    if (kind, num_bits) != ("float", 8):
        raise part.error("type", f"is {kind!r} with num_bits {num_bits!r}, supported is 'float' with num_bits 8")
    if not part.flag("symmetric", True):
        raise part.error("symmetric", "is false, supported is true")


def _exceptions(section: ConfigFields, field: str) -> tuple[re.Pattern[str], ...]:
    """Compiles a list of names of layers or their parents, suffixes of such names, and patterns after "re:"."""
    names = section.raw(field, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and len(name) <= 1000 for name in names):
        raise section.error(field, f"is {names!r}, expected a list of module names")
    if len(names) > _MAX_EXCEPTIONS:
        raise section.error(field, f"has {len(names)} entries, at most {_MAX_EXCEPTIONS} are allowed")
    patterns = [name.removeprefix("re:") for name in names if name.startswith("re:")]
    for pattern in patterns:  # matching may otherwise take exponential time
        if len(_REPEAT.findall(pattern)) > _MAX_REPEATS or _REPEATED_GROUP.search(pattern):
            raise section.error(
                field, f"has the pattern {pattern!r}, supported are {_MAX_REPEATS} repeats and no repeated groups"
            )
    names = [name for name in names if not name.startswith("re:")]
    try:
        return tuple(
            re.compile(pattern) for pattern in patterns + [rf"(.*\.)?{re.escape(name)}(\.|$)" for name in names]
        )
    except re.error as error:
        raise section.error(field, f"has the invalid pattern {error.pattern!r}: {error}") from error
