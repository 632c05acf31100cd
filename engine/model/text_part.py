"""The text part of checkpoints for text and images: its configuration, and the names of its tensors.

Only parts that are the decoder of a family, with another place for fields and tensors, are listed.
"""

from collections.abc import Callable
from pathlib import Path

from engine.model.checkpoint_file import exists
from engine.model.config_fields import ConfigFields

TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
}
"""Architecture -> architecture of its text part, and the `model_type` that `text_config` then has."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
"""Fields beside `text_config` that count for the text part too, before its own."""

_DECODER_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Prefixes of tensors as files have them, older ones first, and as the decoder has them."""

_IMAGE_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_fields(fields: ConfigFields) -> ConfigFields:
    """Returns the configuration of the text part, which for other models is the whole one.

    Raises: CheckpointError: the text part is of another type, or quantised.
    """
    found = _text_part(fields)
    if found is None:
        return fields
    architecture, model_type = found
    text = fields.section("text_config")
    if text.raw("model_type", model_type) != model_type:
        raise text.error("model_type", f"is {text.raw('model_type')!r}, the supported text part is {model_type}")
    if "quantization_config" in fields or "quantization_config" in text:
        raise fields.error(
            "quantization_config",
            "is not supported for a checkpoint with images: use the one in 16 bits, with --quantization",
        )
    whole = {name: fields.raw(name) for name in _OF_THE_WHOLE if name in fields}
    return text.replaced({**whole, "architectures": [architecture]})


def decoder_names(path: Path) -> Callable[[str], str | None]:
    """Returns what maps the name of a tensor in a checkpoint folder to the decoder's; None: a tensor for images.

    Names of other models, and unknown ones, are unchanged.
    """
    config_path = path / "config.json"
    if exists(config_path) and _text_part(ConfigFields.from_file(config_path)) is not None:
        return _decoder_name
    return lambda name: name


def _decoder_name(name: str) -> str | None:
    if name.startswith(_IMAGE_PREFIXES):
        return None
    for prefix, replacement in _DECODER_NAMES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _text_part(fields: ConfigFields) -> tuple[str, str] | None:
    names = fields.raw("architectures", None)
    if not isinstance(names, list):
        return None
    return next((part for architecture, part in TEXT_PARTS.items() if architecture in names), None)
