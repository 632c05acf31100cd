"""The configuration and the class of a model of transformers; of one for images or sound those of its text part."""

from pathlib import Path
from typing import Any

import transformers

from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint
from engine.model.config_fields import ConfigFields
from engine.model.gguf_checkpoint import is_gguf
from engine.model.implementation import CAUSAL_NAMES
from engine.model.text_part import computed_as, is_published_with_code, transformers_text
from engine.model.transformers_head import with_head


def read_config(path: Path) -> Any:
    """Returns the configuration as transformers reads it, with its defaults; of a model for images too its text part.

    Raises: CheckpointError: transformers refuses it, or has no such causal language model.
    """
    fields = open_checkpoint(path).config()
    text = transformers_text(fields)
    try:
        if is_gguf(path):
            config = _config_of_gguf(fields)
        elif text is not None and is_published_with_code(fields):
            config = _config_alone(fields, text)
        else:
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            config = config if text is None else text_config_of(config, computed_as(fields))
    except Exception as error:  # of any code of transformers, from a file that is not trusted
        raise refusal(path, first_line(error)) from error
    if hasattr(config, "quantization_config"):  # ours to read: transformers would ask for libraries of its own
        del config.quantization_config
    if causal_class(config) is None:
        raise refusal(path, f"model_type {config.model_type} is no causal language model of transformers")
    return config


def _config_of_gguf(fields: ConfigFields) -> Any:
    """Returns the configuration of a GGUF file."""
    values = fields.with_nulls()  # which is no default: without a window EXAONE 4 rotates all layers
    rope = {name: values.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    rope |= values.pop("rope_scaling", None) or {"rope_type": "default"}
    rope = values.pop("rope_parameters", None) or rope
    others = {name: value for name, value in values.items() if name not in ("architectures", "quantization_config")}
    return transformers.AutoConfig.for_model(rope_parameters=rope, **others)


def _config_alone(whole: ConfigFields, text: ConfigFields) -> Any:
    """Returns the configuration of a text part whose whole is none of transformers."""
    values = {name: value for name, value in text.with_nulls().items() if name not in ("architectures", "auto_map")}
    dtype = text.raw("dtype", text.raw("torch_dtype", whole.raw("dtype", whole.raw("torch_dtype", None))))
    decoded: Any = transformers.PreTrainedConfig._decode_special_floats({**values, "dtype": dtype})
    return transformers.AutoConfig.for_model(**decoded)


def text_config_of(whole: Any, model_type: str | None) -> Any:
    """Returns the configuration of the text part; with a model type, as one of that class."""
    text = whole.get_text_config()
    dtype = text.dtype or whole.dtype
    if model_type is not None:
        values = text.to_dict()
        text = transformers.AutoConfig.for_model(
            model_type, **{name: value for name, value in values.items() if name not in ("model_type", "architectures")}
        )
    text.dtype = dtype
    if hasattr(whole, "tie_word_embeddings"):
        text.tie_word_embeddings = whole.tie_word_embeddings
    return text


def causal_class(config: Any) -> Any:
    """Returns the causal language model of a configuration; None: transformers has none.

    That of Mistral 4 is among the models of images.
    """
    mappings: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    return found[0] if found and found[0].__name__.endswith(CAUSAL_NAMES) else with_head(config)


def refusal(path: Path, reason: str) -> CheckpointError:
    """Returns the error for a model that transformers has and Chairlift cannot serve."""
    return CheckpointError(f"{path}: cannot be served by transformers: {reason}")


def first_line(error: Exception) -> str:
    """Returns the first line of an error of transformers, with its type if that is all."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
