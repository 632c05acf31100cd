"""gpt-oss (arXiv:2508.10925): a mixture in every layer, windows in every other one, and sinks of attention."""

from engine.model.config_fields import ConfigFields
from engine.model.family import (
    DecoderTraits,
    Family,
    Mixture,
    num_layers,
    same_ropes,
    sliding_window,
    windows_by_layer_type,
)
from kernels.gates import ClampedGate

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a checkpoint that has neither rope_parameters nor rope_scaling."""


def _traits(fields: ConfigFields) -> DecoderTraits:
    window, number = sliding_window(fields), num_layers(fields)
    mixture = Mixture.from_fields(
        fields,
        num_experts="num_local_experts",
        inner_size="intermediate_size",
        normalizes=True,
        router="router",
        has_bias=True,
        is_stacked=fields.flag("stacks_experts", True),  # a GGUF file has them one by one
        clamped_gate=ClampedGate(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
    )
    has_bias = fields.flag("attention_bias", True)
    return DecoderTraits(
        sliding_windows=windows_by_layer_type(
            fields, window, tuple(None if layer % 2 else window for layer in range(number))
        ),
        ropes=same_ropes(fields if "rope_scaling" in fields else fields.with_defaults({"rope_parameters": _ROPE})),
        qkv_bias=has_bias,
        o_bias=has_bias,
        has_sinks=True,
        mixtures=(mixture,) * number,
    )


GPT_OSS = Family(
    "GptOssForCausalLM",
    _traits,
    {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
