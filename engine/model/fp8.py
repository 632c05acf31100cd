"""Checkpoints with linear layers in 8-bit floats: reads their `quantization_config`.

Supported are the two formats that tools write for W8A8: `quant_method` "fp8" (AutoFP8, transformers) and
"compressed-tensors" (llm-compressor). Weights are float8_e4m3fn with one scale per tensor, per output channel or per
block of 128 x 128 (`weight_block_size` of DeepSeek and Qwen3, strategy "block" of compressed-tensors). Activations of
8-bit products get scales computed from their values: one per token or, beside weights with scales per block, one per
token and 128 inputs. This is at least as exact as a static scale for a whole tensor, so the scales of static schemes
for activations, keys and values are not used.
"""

import re
from dataclasses import dataclass

from engine.model.config_fields import ConfigFields
from kernels.fp8_block import BLOCK

_MAX_EXCEPTIONS = 4096
_MAX_REPEATS = 4
_REPEAT = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")

_METHODS = ("fp8", "compressed-tensors")
_INSTEAD = "serve the checkpoint that was quantised, with --quantization int8 on a CPU, fp8 on a GPU"


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Which linear layers of a checkpoint are stored in 8 bits.

    Attributes:
        exceptions: patterns for the names of the layers that are not.
        has_blocks: whether scales are per block of 128 x 128 weights; otherwise per tensor or output channel.
        scale_name: last part of the names of scales in the checkpoint, beside `weight`.
    """

    exceptions: tuple[re.Pattern[str], ...]
    has_blocks: bool = False
    scale_name: str = "weight_scale"

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
        raise section.error("quant_method", f"is {method!r}, supported are {', '.join(_METHODS)}; {_INSTEAD}")

    @classmethod
    def _from_fp8(cls, section: ConfigFields) -> "Fp8Weights":
        has_blocks = "weight_block_size" in section
        if has_blocks and (size := section.raw("weight_block_size")) != [BLOCK, BLOCK]:
            raise section.error("weight_block_size", f"is {size!r}, supported is [{BLOCK}, {BLOCK}]")
        scheme = section.raw("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise section.error("activation_scheme", f"is {scheme!r}, supported are dynamic, static")
        if has_blocks and scheme != "dynamic":
            raise section.error("activation_scheme", f"is {scheme!r}, supported with weight_block_size is dynamic")
        exceptions = _exceptions(section, "modules_to_not_convert") + _exceptions(section, "ignored_layers")
        return cls(exceptions, has_blocks, "weight_scale_inv" if has_blocks else "weight_scale")

    @classmethod
    def _from_compressed_tensors(cls, section: ConfigFields) -> "Fp8Weights":
        if "kv_cache_scheme" in section:
            _check_float8(section.section("kv_cache_scheme"))
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
        if strategy not in ("tensor", "channel", "block"):
            raise weights.error("strategy", f"is {strategy!r}, supported are tensor, channel, block")
        has_blocks = strategy == "block"
        if has_blocks and (size := weights.raw("block_structure", None)) != [BLOCK, BLOCK]:
            raise weights.error("block_structure", f"is {size!r}, supported is [{BLOCK}, {BLOCK}]")
        strategy = activations.raw("strategy", "tensor")
        if strategy not in ("token", "tensor") and not (has_blocks and strategy == "group"):
            supported = "group, token, tensor" if has_blocks else "token, tensor"
            raise activations.error("strategy", f"is {strategy!r}, supported are {supported}")
        if strategy == "group" and (size := activations.raw("group_size", None)) != BLOCK:
            raise activations.error("group_size", f"is {size!r}, supported is {BLOCK}")
        return cls(_exceptions(section, "ignore"), has_blocks)

    def holds(self, module: str) -> bool:
        """Whether a linear layer is stored in 8 bits; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return not any(exception.match(module) for exception in self.exceptions)


def _check_float8(part: ConfigFields) -> None:
    kind, num_bits = part.raw("type", "absent"), part.raw("num_bits", 0)
    if (kind, num_bits) != ("float", 8):
        raise part.error(
            "type", f"is {kind!r} with num_bits {num_bits!r}, supported is 'float' with num_bits 8; {_INSTEAD}"
        )
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
