"""Tiny random checkpoints of every family, saved by `transformers`."""

from pathlib import Path
from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The scaling of Llama 3.1's rotation."""

_SMALL = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
_DELTA_RULES = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 0.05,
}
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_SHARED_EXPERT, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_SHARED_EXPERT,
            **_DELTA_RULES,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        _DELTA_RULES,
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_SHARED_EXPERT, **_DELTA_RULES}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "rms_norm_eps": 0.05,
            "logits_scaling": 2.5,
        },
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 0.05}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.05,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.05,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "swiglu_limit": 1.0,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", {"head_dim": 16}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16, "rms_norm_eps": 0.05}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = {"model_type": "siglip_vision_model", **_VISION}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_heads": 2}
_MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}
WITH_IMAGES: dict[str, tuple[str, str, str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3 with images": (
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {},
        SIGLIP,
    ),
    "mistral with images": (
        "mistral",
        "MistralConfig",
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {},
        {"model_type": "pixtral", **_VISION, "head_dim": 16},
    ),
    "qwen2 with images": (
        "qwen2",
        "Qwen2VLTextConfig",
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {"rope_parameters": _MROPE},
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2},
    ),
    "qwen2.5 with images": (
        "qwen2",
        "Qwen2_5_VLTextConfig",
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": _MROPE},
        {**_QWEN_VISION, "fullatt_block_indexes": [0]},
    ),
    "qwen3.5 with images": (
        "qwen3_5",
        "Qwen3_5TextConfig",
        "Qwen3_5Config",
        "Qwen3_5ForConditionalGeneration",
        {},
        {**_QWEN_VISION, "num_position_embeddings": 16},
    ),
    "qwen3.5 with experts and images": (
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        {},
        {**_QWEN_VISION, "num_position_embeddings": 16},
    ),
    "qwen3 with images": (
        "qwen3",
        "Qwen3VLTextConfig",
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "qwen3 with experts and images": (
        "qwen3_moe",
        "Qwen3VLMoeTextConfig",
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {"rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}},
        {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "glm4 with images": (
        "glm4",
        "Glm4vTextConfig",
        "Glm4vConfig",
        "Glm4vForConditionalGeneration",
        {"head_dim": None, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "llama with images": (
        "llama",
        "LlamaConfig",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {},
        SIGLIP,
    ),
    "llama with images under other names": (
        "llama",
        "LlamaConfig",
        "SmolVLMConfig",
        "SmolVLMForConditionalGeneration",
        {},
        _VISION,
    ),
}
"""Checkpoint -> text part, a key of `ARCHITECTURES`; its configuration, that of the whole, and the model; fields of the
text part, and of the vision part."""


def save_checkpoint(
    path: Path,
    architecture: str,
    *,
    seed: int,
    dtype: str,
    max_shard_size: str,
    joins_experts: bool = False,
    **overrides: Any,
) -> None:
    """Saves a random checkpoint.

    Args:
        path: its folder.
        architecture: a key of `ARCHITECTURES` or of `WITH_IMAGES`.
        seed, dtype: of the weights.
        max_shard_size: as for `save_pretrained`.
        joins_experts: whether experts are stored together, as Qwen3.5 is published; see `join_experts`.
        overrides: fields of its config, or of that of its text part.
    """
    import torch
    import transformers

    if architecture in WITH_IMAGES:
        text, text_class, config_class, model_class, text_fields, vision = WITH_IMAGES[architecture]
        fields = {**_SMALL, **ARCHITECTURES[text][2], **text_fields, **overrides}
        config = getattr(transformers, config_class)(
            text_config=getattr(transformers, text_class)(**fields).to_dict(),
            vision_config=vision,
            tie_word_embeddings=fields["tie_word_embeddings"],
        )
    else:
        config_class, model_class, defaults = ARCHITECTURES[architecture]
        config = getattr(transformers, config_class)(**{**_SMALL, **defaults, **overrides})
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name and "vis" not in name:  # around one, so that a forgotten norm weight shows
            adds_one = model_class.startswith(("Gemma", "Qwen3_5", "Qwen3Next")) and "linear_attn" not in name
            values = (not adds_one) + 0.2 * noise
        elif parameter.ndim == 1:  # biases that matter
            values = 0.2 * noise
        else:  # keeps activations and logits near unit scale
            values = noise * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if joins_experts:
        join_experts(path)


def join_experts(path: Path) -> None:
    """Stores the experts of each layer in two tensors: [experts, 2 * inner, hidden] and [experts, hidden, inner].

    The checkpoint has one file.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    last = ".0.gate_proj.weight"
    for prefix in [name.removesuffix(last) for name in tensors if name.endswith(f".experts{last}")]:
        stacks: list[list[torch.Tensor]] = []
        while f"{prefix}.{len(stacks)}{last[2:]}" in tensors:
            stacks.append(
                [tensors.pop(f"{prefix}.{len(stacks)}.{name}_proj.weight") for name in ("gate", "up", "down")]
            )
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in stacks])
        tensors[f"{prefix}.down_proj"] = torch.stack([down for *_, down in stacks])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
