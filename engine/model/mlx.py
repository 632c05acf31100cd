"""Reads how MLX has quantised a checkpoint: `quantization` in config.json, whatever `quantization_config` is beside it.

MLX (mlx-lm) quantises the embedding and the output head too. It keeps words of a matrix with a scale and an offset per
group of inputs, as `engine.model.int_matrix` describes.
"""

from dataclasses import replace
from typing import Any

from engine.model.config_fields import ConfigFields
from engine.model.int_weights import IntWeights
from engine.model.module_patterns import module_patterns

METHOD = "mlx"

_BITS = (2, 3, 4, 5, 6, 8)
_MIN_BITS_IN_MEMORY = 4
_GROUP_SIZES = (32, 64, 128)
_OF_ALL = ("group_size", "bits", "mode")
"""Settings; other names are those of modules with settings of their own."""
_OTHERS = (*_OF_ALL, "quant_method")


def with_mlx_section(fields: ConfigFields) -> ConfigFields:
    """Returns a configuration whose settings of MLX are a `quantization_config`; others unchanged.

    Raises: CheckpointError: `quantization` is no object.
    """
    section = fields.section("quantization")
    is_of_mlx = "bits" in section and "quant_method" not in fields.section("quantization_config")
    return fields.replaced({"quantization_config": section.replaced({"quant_method": METHOD})}) if is_of_mlx else fields


def read_mlx(section: ConfigFields) -> IntWeights:
    """Reads the settings, and those of layers with settings of their own, as of mixed recipes and DWQ.

    Raises: CheckpointError: a field is not supported.
    """
    not_quantised, of_layers = [], {}
    of_all = _settings(section)
    for name in section.names:
        if name in _OTHERS or (own := section.raw(name)) is True:
            continue
        if own is False:
            not_quantised.append(name)
        elif (settings := _settings(section.section(name).with_defaults(_own_settings(section)))) != of_all:
            of_layers[name] = settings
    exceptions = module_patterns(section.replaced({"false": not_quantised}), "false")
    return replace(of_all, exceptions=exceptions, of_layers=of_layers)


def _own_settings(section: ConfigFields) -> dict[str, Any]:
    return {name: section.raw(name) for name in _OF_ALL if name in section}


def _settings(section: ConfigFields) -> IntWeights:
    """Reads bits, groups and mode."""
    instead = "use another conversion, or the checkpoint that was quantised"
    if (mode := section.raw("mode", "affine")) != "affine":
        raise section.error("mode", f"is {mode!r}, supported of MLX is 'affine'; {instead}")
    if (num_bits := section.integer("bits")) not in _BITS:
        raise section.error("bits", f"is {num_bits}, supported of MLX are {', '.join(map(str, _BITS))}")
    if (group_size := section.integer("group_size")) not in _GROUP_SIZES:
        raise section.error("group_size", f"is {group_size}, supported of MLX are {', '.join(map(str, _GROUP_SIZES))}")
    return IntWeights(
        layout="mlx",
        num_bits=max(num_bits, _MIN_BITS_IN_MEMORY),
        stored_bits=num_bits,
        group_size=group_size,
        has_vocabulary=True,
    )
