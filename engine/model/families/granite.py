"""Granite 3 and 4 dense: Llama with factors of embeddings, attention, residual stream and logits (arXiv:2407.13739)."""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.families.llama import LLAMA, llama_traits
from engine.model.family import DecoderTraits, Family


def _traits(fields: ConfigFields) -> DecoderTraits:
    return replace(
        llama_traits(fields),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


GRANITE = Family("GraniteForCausalLM", _traits, LLAMA.defaults)
