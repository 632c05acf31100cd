"""Sampling values that apply where a request leaves one unset: the model's `generation_config.json`, else those of the
API.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from frontend.text.chat_template_files import load_object

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors recommend, or the API's neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sampling_defaults(files: Mapping[str, bytes]) -> SamplingDefaults:
    """Reads the defaults out of the tokenizer's files.

    A value that the API would refuse in a request is left at the API's own default and named in the log: the operator's
    file must not make every request fail. `do_sample: false` is not taken as temperature 0; it is the file's way to say
    nothing, and most files do.

    Args:
        files: file name -> content, as fetched from the engine or read from a folder.
    """
    try:
        config = load_object(files, GENERATION_CONFIG_FILE)
    except ValueError as error:
        logger.warning("%s; using the API's sampling defaults", error)
        return SamplingDefaults()
    api = SamplingDefaults()
    return SamplingDefaults(
        temperature=_number(config, "temperature", api.temperature, low=0.0, high=100.0),
        top_p=_number(config, "top_p", api.top_p, low=math.ulp(0.0), high=1.0),
        top_k=int(_number(config, "top_k", api.top_k, low=0, high=2**31 - 1)),
    )


def _number(config: Mapping[str, object], key: str, fallback: float, *, low: float, high: float) -> float:
    value = config.get(key)
    if value is None:
        return fallback
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        logger.warning(
            "%s: %s is %r, outside [%g, %g]; using %g", GENERATION_CONFIG_FILE, key, value, low, high, fallback
        )
        return fallback
    return value
