"""Granite 3 and 4 dense: Llama with factors of embeddings, attention, residual stream and logits (arXiv:2407.13739)."""

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes


def _traits(fields: ConfigFields) -> DecoderTraits:
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=(None,) * num_layers(fields),
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


GRANITE = Family("GraniteForCausalLM", _traits, {"eos_token_id": 2})
