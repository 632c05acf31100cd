"""The text part of checkpoints for text and images: its configuration, and the names of its tensors.

Only parts that are the decoder of a family, with another place for fields and tensors, are listed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.model.checkpoint_file import exists
from engine.model.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of an architecture.

    Attributes:
        architecture: the architecture of its decoder.
        model_type: what `text_config` has as `model_type`.
        defaults: values of absent fields, where they are not those of its decoder.
        may_be_flat: whether older files have no `text_config`, and its fields beside those of the images.
        end_token_id: the end token of its class, where that is not the one of its decoder.
        ties_by_either: whether embeddings are tied if the file or its `text_config` says so; otherwise the file decides
            where it has the field.
        ties_by_class: whether embeddings are tied where the file does not say.
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    may_be_flat: bool = False
    end_token_id: int | None = None
    ties_by_either: bool = False
    ties_by_class: bool = False


def _qwen2_vl(model_type: str) -> TextPart:
    return TextPart(
        "Qwen2ForCausalLM",
        model_type,
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1e6},
        may_be_flat=True,
        end_token_id=151645,
        ties_by_either=True,
    )


TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", "mistral", ties_by_class=True),
    "Qwen2VLForConditionalGeneration": _qwen2_vl("qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": _qwen2_vl("qwen2_5_vl_text"),
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": TextPart("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", "qwen3_vl_text", {"rope_theta": 5e5}),
}
"""Text parts by architecture."""

_OF_TRANSFORMERS = (
    ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    ("Gemma4ForConditionalGeneration", "gemma4_text"),
    ("Lfm2VlForConditionalGeneration", "lfm2"),
    ("Mistral3ForConditionalGeneration", "ministral3"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
)
"""Text parts that transformers computes: architecture, and what `text_config` has as `model_type`."""

_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields beside `text_config` that count for the text part too, before its own."""

_DECODER_NAMES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Prefixes of tensors as files have them, older ones first, and as the decoder has them."""

_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision.", "audio_tower.", "embed_audio.")
_OTHER_PREFIXES = (*_OTHER_PARTS, *(f"model.{part}" for part in _OTHER_PARTS), "mtp.")
"""Prefixes of tensors for images or sound, and for the prediction of several tokens at once."""

_ALSO_ALONE = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
"""Decoders whose checkpoints may have other parts although their architecture is that of text, as in transformers."""


def transformers_text(fields: ConfigFields) -> ConfigFields | None:
    """Returns the configuration of a text part that transformers computes; None: it is no such checkpoint."""
    names = fields.raw("architectures", None)
    if not isinstance(names, list) or not names or "text_config" not in fields:
        return None
    text = fields.section("text_config")
    return text if (names[0], text.raw("model_type", None)) in _OF_TRANSFORMERS else None


def has_native_text(fields: ConfigFields) -> bool:
    """Whether the text part of a checkpoint is the decoder of a family, by its `model_type`."""
    part = _text_part(fields)
    if part is None or "text_config" not in fields:
        return part is not None
    return bool(fields.section("text_config").raw("model_type", part.model_type) == part.model_type)


def transformers_fields(fields: ConfigFields) -> ConfigFields:
    """Returns the configuration of what transformers computes: of a checkpoint with other parts too its text part."""
    text = transformers_text(fields)
    if text is None:
        return fields
    return text.replaced({name: fields.raw(name) for name in ("quantization_config",) if name in fields})


def text_fields(fields: ConfigFields) -> ConfigFields:
    """Returns the configuration of the text part, which for other models is the whole one.

    Raises: CheckpointError: the text part is of another type.
    """
    part = _text_part(fields)
    if part is None:
        return fields
    if part.may_be_flat and "text_config" not in fields:
        text = fields
    else:
        text = fields.section("text_config")
        if text.raw("model_type", part.model_type) != part.model_type:
            raise text.error(
                "model_type", f"is {text.raw('model_type')!r}, the supported text part is {part.model_type}"
            )
    whole = {name: fields.raw(name) for name in _OF_THE_WHOLE if name in fields}
    if part.ties_by_either and text.flag("tie_word_embeddings", False):
        whole["tie_word_embeddings"] = True
    text = text.with_defaults(dict(part.defaults))
    return text.replaced({**whole, **_ropes_of_text(text), "architectures": [part.architecture]})


def ties_by_class(fields: ConfigFields) -> bool:
    """Whether embeddings are tied by the class of a model with images, because its file does not say."""
    part = _text_part(fields)
    return part is not None and part.ties_by_class and "tie_word_embeddings" not in fields


def end_token_defaults(fields: ConfigFields) -> dict[str, Any]:
    """Returns the end token of the class of the text part, for a file that names none; nothing for other models."""
    part = _text_part(fields)
    return {} if part is None or part.end_token_id is None else {"eos_token_id": part.end_token_id}


def _ropes_of_text(text: ConfigFields) -> dict[str, Any]:
    """Returns the rotations that `mrope` names, which older files have, as the default ones.

    M-RoPE (arXiv:2409.12191) takes the angles of a head from a token's place in time, height and width. Those of text
    are equal, so any division of the head among them is the rotation by one position.
    """
    sections = {name: text.section(name) for name in ("rope_parameters", "rope_scaling")}
    return {
        name: {**section.values, "rope_type": "default"}
        for name, section in sections.items()
        if section.raw("rope_type", section.raw("type", None)) == "mrope"
    }


def stored_names(name: str) -> tuple[str, ...]:
    """Returns the names that a module of the decoder may have in a checkpoint, its own first."""
    others = (
        (stored + f"{name}.".removeprefix(own)).removesuffix(".")
        for stored, own in _DECODER_NAMES.items()
        if stored != own and f"{name}.".startswith(own)
    )
    return name, *others


def decoder_names(path: Path) -> Callable[[str], str | None]:
    """Returns what maps the name of a tensor in a checkpoint folder to the decoder's; None: one for images or sound.

    Names of other models, and unknown ones, are unchanged.
    """
    config_path = path / "config.json"
    if not exists(config_path):
        return lambda name: name
    fields = ConfigFields.from_file(config_path)
    is_part = _text_part(fields) is not None or transformers_text(fields) is not None
    names = fields.raw("architectures", None)
    has_others = is_part or (isinstance(names, list) and any(architecture in names for architecture in _ALSO_ALONE))
    return decoder_name if has_others else lambda name: name


def decoder_name(name: str) -> str | None:
    """Returns the decoder's name of a tensor of a checkpoint for text and images; None: one for images or sound."""
    if name.startswith(_OTHER_PREFIXES):
        return None
    for prefix, replacement in _DECODER_NAMES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _text_part(fields: ConfigFields) -> TextPart | None:
    names = fields.raw("architectures", None)
    if not isinstance(names, list):
        return None
    return next((part for architecture, part in TEXT_PARTS.items() if architecture in names), None)
