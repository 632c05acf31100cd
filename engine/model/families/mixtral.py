"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from dataclasses import replace

from engine.model.config_fields import ConfigFields
from engine.model.families.mistral import mistral_traits
from engine.model.family import DecoderTraits, Family, Mixture, num_layers


def _traits(fields: ConfigFields) -> DecoderTraits:
    mixture = Mixture.from_fields(
        fields,
        num_experts="num_local_experts",
        inner_size="intermediate_size",
        normalizes=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return replace(mistral_traits(fields), mixtures=(mixture,) * num_layers(fields))


MIXTRAL = Family(
    "MixtralForCausalLM",
    _traits,
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 2,
    },
)
