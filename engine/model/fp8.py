"""Linear layers of a checkpoint in 8-bit floats.

Tools write them in two formats: `quant_method` "fp8" (AutoFP8, transformers) and "compressed-tensors" (llm-compressor)
with weights of type "float". Weights are float8_e4m3fn with one scale per tensor, per output channel or per
block of 128 x 128 (`weight_block_size` of DeepSeek and Qwen3, strategy "block" of compressed-tensors). Activations of
8-bit products get scales computed from their values: one per token or, beside weights with scales per block, one per
token and 128 inputs. This is at least as exact as a static scale for a whole tensor, so the scales of static schemes
for activations, keys and values are not used.
"""

from collections.abc import Collection
from dataclasses import dataclass

from engine.model.config_fields import ConfigFields
from engine.model.module_patterns import ModulePattern, is_selected, module_patterns, targeted_modules
from kernels.scale_groups import FP8_BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Which linear layers of a checkpoint are stored in 8 bits.

    Attributes:
        exceptions: patterns for the names of the layers that are not.
        has_blocks: whether scales are per block of 128 x 128 weights; otherwise per tensor or output channel.
        scale_name: last part of the names of scales in the checkpoint, beside `weight`.
        only: patterns for the names of the layers that are; None: all others.
    """

    exceptions: tuple[ModulePattern, ...]
    has_blocks: bool = False
    scale_name: str = "weight_scale"
    only: tuple[ModulePattern, ...] | None = None

    @classmethod
    def from_fp8(cls, section: ConfigFields) -> "Fp8Weights":
        """Reads a `quantization_config` of AutoFP8 and transformers.

        Raises: CheckpointError: a field is not supported.
        """
        has_blocks = "weight_block_size" in section
        if has_blocks and (size := section.raw("weight_block_size")) != [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE]:
            raise section.error("weight_block_size", f"is {size!r}, supported is [{FP8_BLOCK_SIZE}, {FP8_BLOCK_SIZE}]")
        scheme = section.raw("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise section.error("activation_scheme", f"is {scheme!r}, supported are dynamic, static")
        if has_blocks and scheme != "dynamic":
            raise section.error("activation_scheme", f"is {scheme!r}, supported with weight_block_size is dynamic")
        exceptions = module_patterns(section, "modules_to_not_convert") + module_patterns(section, "ignored_layers")
        is_of_transformers = has_blocks or section.is_null("weight_block_size")  # a field that AutoFP8 does not write
        return cls(exceptions, has_blocks, "weight_scale_inv" if is_of_transformers else "weight_scale")

    @classmethod
    def from_compressed_tensors(cls, section: ConfigFields, group: ConfigFields) -> "Fp8Weights":
        """Reads a `quantization_config` of llm-compressor, and the one group in its `config_groups`.

        Raises: CheckpointError: a field is not supported.
        """
        if "kv_cache_scheme" in section:
            _check_float8(section.section("kv_cache_scheme"))
        weights, activations = group.section("weights"), group.section("input_activations")
        for part in (weights, activations):
            _check_float8(part)
        strategy = weights.raw("strategy", "tensor")
        if strategy not in ("tensor", "channel", "block"):
            raise weights.error("strategy", f"is {strategy!r}, supported are tensor, channel, block")
        has_blocks = strategy == "block"
        if has_blocks and (size := weights.raw("block_structure", None)) != [FP8_BLOCK_SIZE, FP8_BLOCK_SIZE]:
            raise weights.error("block_structure", f"is {size!r}, supported is [{FP8_BLOCK_SIZE}, {FP8_BLOCK_SIZE}]")
        strategy = activations.raw("strategy", "tensor")
        if strategy not in ("token", "tensor") and not (has_blocks and strategy == "group"):
            supported = "group, token, tensor" if has_blocks else "token, tensor"
            raise activations.error("strategy", f"is {strategy!r}, supported are {supported}")
        if strategy == "group" and (size := activations.raw("group_size", None)) != FP8_BLOCK_SIZE:
            raise activations.error("group_size", f"is {size!r}, supported is {FP8_BLOCK_SIZE}")
        return cls(module_patterns(section, "ignore"), has_blocks, only=targeted_modules(group))

    def holds(self, module: str) -> bool:
        """Whether a linear layer is stored in 8 bits; `module` is its name, such as `model.layers.0.mlp.up_proj`."""
        return is_selected(module, self.exceptions, self.only)

    def packed_bytes(self, _names: Collection[str], num_rows: int, num_columns: int, *, is_compact: bool) -> int:  # noqa: ARG002 - one form
        """Returns the bytes in memory of the matrix that layers form: weights, and scales in fp32."""
        num_scales = -(-num_rows // FP8_BLOCK_SIZE) * -(-num_columns // FP8_BLOCK_SIZE) if self.has_blocks else num_rows
        return num_rows * num_columns + 4 * num_scales


def _check_float8(part: ConfigFields) -> None:
    kind, num_bits = part.raw("type", "absent"), part.raw("num_bits", 0)
    if (kind, num_bits) != ("float", 8):
        raise part.error("type", f"is {kind!r} with num_bits {num_bits!r}, supported is 'float' with num_bits 8")
    if not part.flag("symmetric", True):
        raise part.error("symmetric", "is false, supported is true")
