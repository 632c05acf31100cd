"""The text part of checkpoints for text and images or sound: its configuration, and the names of its tensors.

Which decoder computes it is in `text_decoders.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.model.checkpoint_file import exists
from engine.model.config_fields import ConfigFields
from engine.model.text_decoders import (
    COMPUTED_AS,
    NATIVE_DECODERS,
    OTHER_NAMES,
    PUBLISHED_WITH_CODE,
    TEXT_PARTS,
    THINKERS,
    WITH_ANY_DECODER,
    TextPart,
)

_OF_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields beside `text_config` that count for the text part too, before its own."""

_DECODER_NAMES = {
    "language_model.model.": "model.",
    "language_model.backbone.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "text_model.model.": "model.",
    "text_model.lm_head.": "lm_head.",
    "thinker.model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Prefixes of tensors as files have them, older ones first, and as the decoder has them."""

_OTHER_PARTS = (
    "audio_tower.",
    "embed_audio.",
    "embed_tokens_extend.",
    "embed_vision.",
    "mlp_AR.",
    "multi_modal_projector.",
    "projector.",
    "vision_tower.",
    "visual.",
)
_OF_SPEECH = ("talker.", "token2wav.", "code2wav.")
_OTHER_PREFIXES = (
    *(f"{parent}{part}" for parent in ("", "model.", "thinker.") for part in _OTHER_PARTS),
    *_OF_SPEECH,
    "mtp.",
)
"""Prefixes of tensors for images or sound, and for the prediction of several tokens at once."""

_WITH_ANY = {**WITH_ANY_DECODER, **PUBLISHED_WITH_CODE}
"""Architectures with any decoder, and the model type of files that name none."""

_OF_THE_BASE_MODEL = ("embed_tokens.", "layers.", "norm.")
"""Prefixes of tensors in files of the base model alone, as `AutoModel` saves it."""

_ALSO_ALONE = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
"""Decoders whose checkpoints may have other parts although their architecture is that of text, as in transformers."""


def transformers_text(fields: ConfigFields) -> ConfigFields | None:
    """Returns the configuration of a text part that transformers can compute; None: it is no such checkpoint."""
    text = _section(fields)
    return text if _architecture(fields) in _WITH_ANY or _own_decoder(fields) in COMPUTED_AS else None


def is_published_with_code(fields: ConfigFields) -> bool:
    """Whether transformers has the decoder of a checkpoint, and not the whole model."""
    return _architecture(fields) in PUBLISHED_WITH_CODE


def computed_as(fields: ConfigFields) -> str | None:
    """Returns the model type as which transformers computes a text part; None: the one that it names."""
    return COMPUTED_AS.get(_own_decoder(fields))


def has_native_text(fields: ConfigFields) -> bool:
    """Whether the text part of a checkpoint is the decoder of a family, by its `model_type`."""
    part, text = _text_part(fields), _section(fields)
    if part is None or text is None:
        return part is not None
    return bool(text.raw("model_type", part.model_type) == part.model_type)


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
    part, fields = _text_part(fields), _thinker(fields)
    if part is None:
        return fields
    text = _section(fields)
    if text is None and not part.may_be_flat:
        raise fields.error("text_config", f"is missing: it describes the decoder of {_architecture(fields)}")
    if text is None:
        text = fields
    elif text.raw("model_type", part.model_type) != part.model_type:
        raise text.error("model_type", f"is {text.raw('model_type')!r}, the supported text part is {part.model_type}")
    whole = {name: fields.raw(name) for name in _OF_THE_WHOLE if name in fields}
    if part.ties_by_either and text.flag("tie_word_embeddings", False):
        whole["tie_word_embeddings"] = True
    text = text.with_defaults(dict(part.defaults))
    return text.replaced({**whole, **_ropes_of_text(text), **part.fixed, "architectures": [part.architecture]})


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

    As in `transformers`, names of a native decoder may lack the `model.` of the base model, or have it before all of
    them. Names of other models, and unknown ones, are unchanged.
    """
    config_path = path / "config.json"
    if not exists(config_path):
        return lambda name: name
    fields = ConfigFields.from_file(config_path)
    part = _text_part(fields)
    if _architecture(fields) in _WITH_ANY or (part is not None and part.has_prefix):
        return _name_under_a_prefix
    is_part = part is not None or transformers_text(fields) is not None
    if is_part or _architecture(fields) in _ALSO_ALONE:
        return lambda name: _under_the_base(decoder_name(name))
    return _under_the_base if _architecture(fields) in NATIVE_DECODERS.values() else lambda name: name


def decoder_name(name: str) -> str | None:
    """Returns the decoder's name of a tensor of a checkpoint for text and images; None: one for images or sound."""
    if name.startswith(_OTHER_PREFIXES):
        return None
    for prefix, replacement in _DECODER_NAMES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _under_the_base(name: str | None) -> str | None:
    """Returns a name with the prefix of the base model once, but for the output head."""
    if name is None or not name.startswith((*_OF_THE_BASE_MODEL, "model.model.", "model.lm_head.")):
        return name
    return name.removeprefix("model.") if name.startswith("model.") else f"model.{name}"


def _name_under_a_prefix(name: str) -> str | None:
    """Returns the decoder's name of a tensor, whose prefix tells it from any other part; None: it is of one of them."""
    return decoder_name(name) if name.startswith(tuple(_DECODER_NAMES)) else None


def _text_part(fields: ConfigFields) -> TextPart | None:
    name = _architecture(fields)
    name = THINKERS.get(name, name)
    if name not in _WITH_ANY:
        return TEXT_PARTS.get(name)
    text = _section(fields)
    if text is None:
        raise fields.error("text_config", f"is missing: {name} builds the decoder that it names")
    model_type = text.raw("model_type")
    if not isinstance(model_type, str) or model_type not in NATIVE_DECODERS:
        return None
    return TextPart(NATIVE_DECODERS[model_type], model_type)


def _own_decoder(fields: ConfigFields) -> tuple[str, str]:
    """Returns the architecture and the model type of its text part, as in `COMPUTED_AS`; empty where there is none."""
    model_type = fields.section("text_config").raw("model_type", None)
    return _architecture(fields), model_type if isinstance(model_type, str) else ""


def _section(fields: ConfigFields) -> ConfigFields | None:
    """Returns the configuration of the text part as the file has it; None: the file has none.

    Of an architecture with any decoder it has a `model_type`.
    """
    name = _architecture(fields)
    key = "llm_config" if name in PUBLISHED_WITH_CODE and "llm_config" in fields else "text_config"
    if key not in fields:
        return None
    text = fields.section(key)
    if name not in _WITH_ANY:
        return text
    model_type = text.raw("model_type", _WITH_ANY[name])
    is_other = isinstance(model_type, str) and model_type in OTHER_NAMES
    return text.replaced({"model_type": OTHER_NAMES[model_type] if is_other else model_type})


def _thinker(fields: ConfigFields) -> ConfigFields:
    """Returns the configuration of the part with text of a checkpoint that speaks too; others unchanged."""
    if _architecture(fields) not in THINKERS:
        return fields
    own = {name: fields.raw(name) for name in _OF_THE_WHOLE if name in fields}
    return fields.section("thinker_config").with_defaults(own)


def _architecture(fields: ConfigFields) -> str:
    """Returns the first entry of `architectures`; empty if there is none."""
    names = fields.raw("architectures", None)
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
