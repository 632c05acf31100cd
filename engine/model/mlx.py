"""Reads how MLX has quantised a checkpoint: `quantization` in config.json, whatever `quantization_config` is beside it.

MLX (mlx-lm) quantises the embedding and the output head too. It keeps words of a matrix with a scale and an offset per
group of inputs, as `engine.model.int_matrix` describes.
"""

from engine.model.config_fields import ConfigFields
from engine.model.int_weights import IntWeights
from engine.model.module_patterns import module_patterns

METHOD = "mlx"

_BITS = (2, 3, 4, 5, 6, 8)
_MIN_BITS_IN_MEMORY = 4
_GROUP_SIZES = (32, 64, 128)
_OF_ALL = {"group_size": None, "bits": None, "mode": "affine"}
"""Settings, with their defaults; other names are those of modules with settings of their own."""
_OTHERS = (*_OF_ALL, "quant_method")


def with_mlx_section(fields: ConfigFields) -> ConfigFields:
    """Returns a configuration whose settings of MLX are a `quantization_config`; others unchanged.

    Raises: CheckpointError: `quantization` is no object.
    """
    section = fields.section("quantization")
    is_of_mlx = "bits" in section and "quant_method" not in fields.section("quantization_config")
    return fields.replaced({"quantization_config": section.replaced({"quant_method": METHOD})}) if is_of_mlx else fields


def read_mlx(section: ConfigFields) -> IntWeights:
    """Reads the settings.

    Raises: CheckpointError: a field is not supported.
    """
    instead = "use another conversion, or the checkpoint that was quantised"
    if (mode := section.raw("mode", "affine")) != "affine":
        raise section.error("mode", f"is {mode!r}, supported of MLX is 'affine'; {instead}")
    if (num_bits := section.integer("bits")) not in _BITS:
        raise section.error("bits", f"is {num_bits}, supported of MLX are {', '.join(map(str, _BITS))}")
    if (group_size := section.integer("group_size")) not in _GROUP_SIZES:
        raise section.error("group_size", f"is {group_size}, supported of MLX are {', '.join(map(str, _GROUP_SIZES))}")
    not_quantised = []
    for name in section.names:
        if name in _OTHERS or (own := section.raw(name)) is True:
            continue
        if own is False:
            not_quantised.append(name)
            continue
        settings = section.section(name)
        for field, default in _OF_ALL.items():
            if (value := settings.raw(field, of_all := section.raw(field, default))) != of_all:
                raise settings.error(field, f"is {value!r}, supported is {of_all!r}, as of all layers; {instead}")
    return IntWeights(
        layout="mlx",
        num_bits=max(num_bits, _MIN_BITS_IN_MEMORY),
        stored_bits=num_bits,
        group_size=group_size,
        exceptions=module_patterns(section.replaced({"false": not_quantised}), "false"),
        has_vocabulary=True,
    )
