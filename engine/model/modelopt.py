"""Reads the settings of NVIDIA's ModelOpt, in `quantization_config` or in a file of its own."""

from engine.model.config_fields import ConfigFields
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.module_patterns import module_patterns

FILE = "hf_quant_config.json"
"""Beside config.json; older checkpoints have the settings only there."""

_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def modelopt_section(source: ConfigFields) -> ConfigFields | None:
    """Returns the settings in a `FILE` as a `quantization_config`; None: weights are not quantised.

    Raises: CheckpointError: `quantization` is no object.
    """
    section = source.section("quantization")
    return section.replaced({"quant_method": "modelopt"}) if "quant_algo" in section else None


def read_modelopt(section: ConfigFields) -> Fp8Weights | Fp4Weights:
    """Reads the settings: those of `FILE`, or a `quantization_config` with quant_method "modelopt".

    Raises: CheckpointError: a field is not supported.
    """
    if "quantization" in section:
        section = section.section("quantization")
    algorithm = section.raw("quant_algo")
    name = algorithm.upper() if isinstance(algorithm, str) else ""  # some versions write small letters
    if name not in (*_FP8, *_NVFP4):
        raise section.error(
            "quant_algo",
            f"is {algorithm!r}, supported of modelopt are {', '.join((*_FP8, *_NVFP4))}; serve the checkpoint that was "
            "quantised, with --quantization int8 on a CPU, fp8 on a GPU",
        )
    exceptions = module_patterns(section, "ignore") + module_patterns(section, "exclude_modules")
    return Fp8Weights(exceptions) if name in _FP8 else Fp4Weights.from_modelopt(section, exceptions)
