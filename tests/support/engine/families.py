"""Random checkpoints of architectures that transformers computes: one of each family, made by transformers."""

from pathlib import Path
from typing import Any

_SMALL = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

TRANSFORMERS_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Apertus": ("Apertus", {}),
    "Arcee": ("Arcee", {}),
    "BitNet": ("BitNet", {}),
    "CodeGen": ("CodeGen", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "Command R": ("Cohere", {}),
    "Command R7B": ("Cohere2", {"sliding_window": 24}),
    "DeepSeek-V2": ("DeepseekV2", _LATENT),
    "DeepSeek-V3": ("DeepseekV3", _LATENT),
    "ERNIE 4.5": ("Ernie4_5", {"head_dim": 16}),
    "EXAONE 4": ("Exaone4", {"sliding_window": 24}),
    "GLM": ("Glm", {"head_dim": 16}),
    "GLM-4": ("Glm4", {"head_dim": 16}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "GPT-J": ("GPTJ", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "gpt-oss": ("GptOss", {**_LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 24}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Granite MoE": ("GraniteMoe", _LOCAL_EXPERTS),
    "Helium": ("Helium", {"head_dim": 16}),
    "Hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "MiniMax-M2": ("MiniMaxM2", {**_LOCAL_EXPERTS, "head_dim": 16}),
    "Ministral": ("Ministral", {"head_dim": 16, "sliding_window": 24}),
    "Nemotron": ("Nemotron", {}),
    "OLMo": ("Olmo", {}),
    "OLMo 3": ("Olmo3", {"sliding_window": 24}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Phi": ("Phi", {"num_key_value_heads": 4}),
    "Qwen2-MoE": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "Seed-OSS": ("SeedOss", {"head_dim": 16}),
    "StableLM": ("StableLm", {}),
    "StarCoder2": ("Starcoder2", {"sliding_window": 24}),
    # families that Chairlift computes too, or may come to, with --model-impl transformers
    "Gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "Gemma 3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "Llama": ("Llama", {"hidden_act": "gelu", "rope_parameters": _YARN}),
    "Mixtral": ("Mixtral", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "OLMo 2": ("Olmo2", {}),
    "Phi-3": ("Phi3", {}),
    "Qwen3-MoE": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
    "SmolLM3": ("SmolLM3", {}),
}
"""Family -> prefix of its classes in transformers, and fields of a small configuration."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "Falcon": ("Falcon", {}),
    "Falcon-H1": ("FalconH1", {}),
    "GPT-Neo": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 3]]}),
    "Jamba": ("Jamba", {"num_experts": 2}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "Llama 4": ("Llama4Text", {"num_local_experts": 2, "head_dim": 16}),
    "Mamba": ("Mamba", {}),
    "Mamba 2": ("Mamba2", {"head_dim": 16, "num_heads": 8, "n_groups": 1, "state_size": 16}),
    "Qwen3-Next": ("Qwen3Next", {**_EXPERTS, "head_dim": 16}),
    "RWKV": ("Rwkv", {}),
    "RecurrentGemma": ("RecurrentGemma", {}),
}
"""Families whose state is no KV cache, or whose attention is not on the interface of transformers; in the same form."""


def family_config(prefix: str, **fields: Any) -> Any:
    """Returns a small configuration of transformers."""
    import transformers

    return getattr(transformers, f"{prefix}Config")(**{**_SMALL, **fields})


def save_family(path: Path, config: Any, *, seed: int = 0) -> None:
    """Saves a checkpoint with random weights, large enough that norms, biases and attention matter."""
    import torch
    import transformers

    config.architectures = None  # set by save_pretrained
    model: Any = transformers.AutoModelForCausalLM
    model = model.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            values = 0.12 * noise
        else:
            values = 1 + 0.2 * noise if "norm" in name or "ln_" in name else 0.2 * noise
        parameter.data.copy_(values)
    model.save_pretrained(path)
