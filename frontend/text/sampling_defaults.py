"""Defaults of unset sampling parameters: from the model's `generation_config.json`, otherwise the API's."""

import logging
from collections.abc import Mapping

from chairlift.service.sampling_fields import SAMPLING, Parameter
from frontend.text.chat_template_files import load_object

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


SamplingDefaults = Mapping[str, float]
"""Defaults by name, for the sampling parameters that a model's file may set."""

_PARAMETERS = {name: parameter for name, parameter in SAMPLING.items() if parameter.rule.from_model}
API_DEFAULTS: SamplingDefaults = {name: parameter.default for name, parameter in _PARAMETERS.items()}


def sampling_defaults(files: Mapping[str, bytes]) -> SamplingDefaults:
    """Reads the defaults from the tokenizer's files.

    A value that the API would refuse in a request is logged and replaced by the API's default, so that requests do not
    fail because of the file. `do_sample: false` does not mean temperature 0, because most files contain it by default.

    Args:
        files: file name -> content, as fetched from the engine or read from a folder.
    """
    try:
        config = load_object(files, GENERATION_CONFIG_FILE)
    except ValueError as error:
        logger.warning("%s; using the API's sampling defaults", error)
        return API_DEFAULTS
    return {name: _number(config.get(name), parameter) for name, parameter in _PARAMETERS.items()}


def _number(value: object, parameter: Parameter) -> float:
    fallback: float = parameter.default
    if value is None:
        return fallback
    if isinstance(value, bool) or not isinstance(value, (int, float)) or parameter.problem(value, vocab_size=0):
        logger.warning(
            "%s: %s is %r, allowed is %s; using %g",
            GENERATION_CONFIG_FILE,
            parameter.name,
            value,
            parameter.range,
            fallback,
        )
        return fallback
    return int(value) if parameter.kind is int else value
