"""Qwen2, Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115) and Qwen3 (arXiv:2505.09388), dense or with experts."""

from dataclasses import replace

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


def _qwen2(fields: ConfigFields) -> DecoderTraits:
    """Biases on queries, keys and values."""
    return DecoderTraits(sliding_windows=_windows(fields), ropes=same_ropes(fields), qkv_bias=True)


def _qwen3(fields: ConfigFields) -> DecoderTraits:
    """Norms of query and key heads; biases only if the checkpoint has them."""
    attention_bias = fields.flag("attention_bias", False)
    return DecoderTraits(
        sliding_windows=_windows(fields),
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


def _qwen2_moe(fields: ConfigFields) -> DecoderTraits:
    """Mixtures of experts beside one that all tokens share.

    Unless `layer_types` says otherwise, every other one of the first `max_window_layers` layers has the window, if
    `use_sliding_window`.
    """
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    last = fields.integer("max_window_layers", 28, minimum=0)
    windows = tuple(window if layer % 2 == 0 and layer < last else None for layer in range(num_layers(fields)))
    mixture = Mixture.from_fields(
        fields,
        num_experts="num_experts",
        inner_size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
        normalizes=fields.flag("norm_topk_prob", False),
    )
    return DecoderTraits(
        sliding_windows=windows_by_layer_type(fields, window, windows),
        ropes=same_ropes(fields),
        qkv_bias=fields.flag("qkv_bias", True),
        mixtures=sparse_layers(fields, mixture),
    )


def _qwen3_moe(fields: ConfigFields) -> DecoderTraits:
    """Mixtures of experts; one window for all."""
    number = num_layers(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    mixture = Mixture.from_fields(
        fields,
        num_experts="num_experts" if "num_experts" in fields else "num_local_experts",
        inner_size="moe_intermediate_size",
        normalizes=fields.flag("norm_topk_prob", False),
    )
    return replace(_qwen3(fields), sliding_windows=(window,) * number, mixtures=sparse_layers(fields, mixture))


def sparse_layers(fields: ConfigFields, mixture: Mixture) -> tuple[Mixture | None, ...]:
    """Returns the mixture in each `decoder_sparse_step`-th layer, but for `mlp_only_layers`.

    Raises: CheckpointError: a bad field.
    """
    step, dense = fields.integer("decoder_sparse_step", 1), fields.raw("mlp_only_layers", None) or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.error("mlp_only_layers", f"is {dense!r}, expected a list of numbers of layers")
    return tuple(None if layer in dense or (layer + 1) % step else mixture for layer in range(num_layers(fields)))


def _windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """The window of each layer; none unless `use_sliding_window`, even if a size is given.

    `layer_types` lists the layers that have one; older checkpoints have it from layer `max_window_layers` on.
    """
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    default = tuple(window if layer >= first else None for layer in range(num_layers(fields)))
    return windows_by_layer_type(fields, window, default)


_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}

QWEN2 = Family("Qwen2ForCausalLM", _qwen2, _DEFAULTS)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    _qwen2_moe,
    {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
)
QWEN3 = Family("Qwen3ForCausalLM", _qwen3, {**_DEFAULTS, "head_dim": 128})
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    _qwen3_moe,
    {
        **_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
    },
)
