"""Llama (arXiv:2302.13971; Llama 3: arXiv:2407.21783, whose rope scaling is in `rope.py`)."""

from engine.model.config_fields import ConfigFields
from engine.model.family import DecoderTraits, Family, num_layers, same_ropes


def llama_traits(fields: ConfigFields) -> DecoderTraits:
    """Biases only if the checkpoint has them, and nothing else."""
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=(None,) * num_layers(fields),
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


LLAMA = Family(
    "LlamaForCausalLM",
    llama_traits,
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
)
