"""Random checkpoints of architectures that transformers computes: one of each family, made by transformers."""

import json
import re
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
_DENSE_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_LATENT = {
    **_DENSE_LATENT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_ROUTED = {**_LATENT, "num_key_value_heads": 2, "n_shared_experts": 1, "head_dim": 16}
_PER_LAYER = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 24,
    "head_dim": 16,
    "vocab_size_per_layer_input": 307,
    "hidden_size_per_layer_input": 16,
}
_ONE_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
_NO_FULL_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": None}
_SCALED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

TRANSFORMERS_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "A.X K1": ("AXK1", _LATENT),
    "Apertus": ("Apertus", {}),
    "Apertus 1.5": ("Apertus1p5Text", {}),
    "Arcee": ("Arcee", {}),
    "Aria": ("AriaText", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "Beam": (
        "Beam",
        {
            **_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "sliding_window": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": _ONE_FULL,
        },
    ),
    "BioGPT": ("BioGpt", {}),
    "BitNet": ("BitNet", {}),
    "CodeGen": ("CodeGen", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "Command A MoE": ("Cohere2Moe", {**_EXPERTS, "sliding_window": 24}),
    "Command R": ("Cohere", {}),
    "Command R7B": ("Cohere2", {"sliding_window": 24}),
    "Cohere Compass": (
        "CohereCompassText",
        {"head_dim": 16, "sliding_window": 24, "layer_types": _ONE_FULL, "rope_parameters": _NO_FULL_ROPE},
    ),
    "CTRL": ("CTRL", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "dff": 96}),
    "CWM": ("Cwm", {"head_dim": 16, "sliding_window": 24}),
    "DeepSeek-V2": ("DeepseekV2", _LATENT),
    "DeepSeek-V3": ("DeepseekV3", _LATENT),
    "dots.llm1": ("Dots1", _ROUTED),
    "ERNIE 4.5": ("Ernie4_5", {"head_dim": 16}),
    "ERNIE 4.5 MoE": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}),
    "EXAONE 4": ("Exaone4", {"sliding_window": 24}),
    "EXAONE MoE": ("ExaoneMoe", {**_EXPERTS, "head_dim": 16, "num_shared_experts": 1, "sliding_window": 24}),
    "FlexOlmo": ("FlexOlmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Flint": (
        "Flint",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "head_dim": 16,
            "sliding_window": 24,
            "mlp_only_layers": [0],
            "layer_types": _ONE_FULL,
        },
    ),
    "Gemma 3n": ("Gemma3nText", {**_PER_LAYER, "activation_sparsity_pattern": [0.5, *[0.0] * 5]}),
    "Gemma 4": ("Gemma4Text", {**_PER_LAYER, "global_head_dim": 32}),
    "Gemma 4 unified": (
        "Gemma4UnifiedText",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "layer_types": _ONE_FULL},
    ),
    "GLM": ("Glm", {"head_dim": 16}),
    "GLM-4": ("Glm4", {"head_dim": 16}),
    "GLM-4.5": ("Glm4Moe", _ROUTED),
    "GLM-4.7 Flash": ("Glm4MoeLite", {**_LATENT, "n_shared_experts": 1}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "GPT-BigCode": ("GPTBigCode", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96}),
    "GPT-J": ("GPTJ", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    "GPT-NeoX": ("GPTNeoX", {}),
    "gpt-oss": ("GptOss", {**_LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 24}),
    "Granite MoE": ("GraniteMoe", _LOCAL_EXPERTS),
    "Granite MoE with a shared expert": ("GraniteMoeShared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 48}),
    "Granite MoE with windows": (
        "GraniteMoeSWA",
        {**_LOCAL_EXPERTS, "shared_intermediate_size": 48, "sliding_window": 24},
    ),
    "Granite with windows": ("GraniteSWA", {"sliding_window": 24}),
    "Helium": ("Helium", {"head_dim": 16}),
    "Hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "Hunyuan 3": ("HYV3", {**_EXPERTS, "head_dim": 16}),
    "Hunyuan-A13B": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "HyperCLOVA X": ("HyperCLOVAX", {}),
    "Jais 2": ("Jais2", {}),
    "Kolibri 1": (
        "Kolibri1",
        {
            **_LOCAL_EXPERTS,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": _ONE_FULL,
        },
    ),
    "Laguna": ("Laguna", {**_EXPERTS, "head_dim": 16}),
    "Mellum": ("Mellum", _EXPERTS),
    "MiMo-V2-Flash": ("MiMoV2Flash", {**_LATENT, "num_key_value_heads": 2, "sliding_window": 24}),
    "MiniCPM3": ("MiniCPM3", _DENSE_LATENT),
    "MiniMax-M2": ("MiniMaxM2", {**_LOCAL_EXPERTS, "head_dim": 16}),
    "Ministral": ("Ministral", {"head_dim": 16, "sliding_window": 24}),
    "Ministral 3": ("Ministral3", {"head_dim": 16}),
    "Mistral 4": ("Mistral4", {**_LATENT, "rope_parameters": _SCALED_YARN}),
    "ModernBERT decoder": ("ModernBertDecoder", {"sliding_window": 24}),
    "nanochat": ("NanoChat", {}),
    "Nemotron": ("Nemotron", {}),
    "OLMo": ("Olmo", {}),
    "OLMo 3": ("Olmo3", {"sliding_window": 24}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "Persimmon": ("Persimmon", {"num_key_value_heads": 4}),
    "Phi": ("Phi", {"num_key_value_heads": 4}),
    "Phi-3.5-MoE": ("Phimoe", _LOCAL_EXPERTS),
    "Qwen2-MoE": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "Seed-OSS": ("SeedOss", {"head_dim": 16}),
    "Solar Open": ("SolarOpen", _ROUTED),
    "StableLM": ("StableLm", {}),
    "StarCoder2": ("Starcoder2", {"sliding_window": 24}),
    "Trinity": ("Afmoe", {**_EXPERTS, "head_dim": 16, "num_shared_experts": 1, "sliding_window": 24}),
    "VaultGemma": ("VaultGemma", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "Youtu-LLM": ("Youtu", _DENSE_LATENT),
    # families that Chairlift computes too, or may come to, with --model-impl transformers
    "Gemma": ("Gemma", {"head_dim": 16}),
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

_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 48}

STATEFUL_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Ling 3": ("BailingHybrid", {**_LATENT, **_LINEAR, "num_local_experts": 4, "head_dim": 16}),
    "Lara mini": (
        "LaraMini",
        {
            **_DELTA,
            **_SHARED_EXPERT,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
            "sliding_window": 24,
            "head_dim": 16,
        },
    ),
    "LFM3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 24,
            "head_dim": 16,
        },
    ),
    "ZAYA1": (
        "Zaya",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 48,
            "head_dim": 16,
            "router_hidden_size": 16,
        },
    ),
    "Bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "Falcon-H1": ("FalconH1", {**_MAMBA, "mamba_d_ssm": 128, "head_dim": 16}),
    "Granite 4": (
        "GraniteMoeHybrid",
        {**_MAMBA, **_LOCAL_EXPERTS, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "Jamba": (
        "Jamba",
        {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    "Kimi Linear": (
        "KimiLinear",
        {**_LATENT, **_LINEAR, "num_local_experts": 4, "linear_num_heads": 2, "linear_head_dim": 16},
    ),
    "LFM2": ("Lfm2", _CONVOLUTIONS),
    "LFM2-MoE": ("Lfm2Moe", {**_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1}),
    "Nemotron-H": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "head_dim": 16,
        },
    ),
    "OLMo Hybrid": ("OlmoHybrid", _LINEAR),
    "Qwen3-Next": ("Qwen3Next", {**_DELTA, **_LINEAR, **_SHARED_EXPERT, "head_dim": 16}),
    "Qwen3.5": ("Qwen3_5Text", {**_DELTA, **_LINEAR, "head_dim": 16}),
    "Qwen3.5-MoE": ("Qwen3_5MoeText", {**_DELTA, **_LINEAR, **_SHARED_EXPERT, "head_dim": 16}),
}
"""The same for families whose layers keep state besides keys and values."""

FAMILIES = {**TRANSFORMERS_FAMILIES, **STATEFUL_FAMILIES}
"""Both."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "A.X K2": ("AXK2", {**_LATENT, "index_topk": 16}),
    "BLOOM": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "DeepSeek-V3.2": ("DeepseekV32", _LATENT),
    "DiffLlama": ("DiffLlama", {}),
    "Doge": ("Doge", {}),
    "Dory": ("Dory", {}),
    "Falcon": ("Falcon", {}),
    "GPT-Neo": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 3]]}),
    "HRM": ("HrmText", {}),
    "Hunyuan 4": ("HYV4", _EXPERTS),
    "Inkling 2": ("Inkling2Text", {}),
    "JetMoE": ("JetMoe", {"kv_channels": 16}),
    "Llama 4": ("Llama4Text", {"num_local_experts": 2, "head_dim": 16}),
    "LongCat-Flash": ("LongcatFlash", {}),
    "Mamba": ("Mamba", {}),
    "Mamba 2": ("Mamba2", {"head_dim": 16, "num_heads": 8, "n_groups": 1, "state_size": 16}),
    "Qwen4": ("Qwen4ExpText", {}),
    "RWKV": ("Rwkv", {}),
    "RecurrentGemma": ("RecurrentGemma", {}),
}
"""Families whose state is no KV cache, or whose attention is not on the interface of transformers; in the same form."""


def family_config(prefix: str, **fields: Any) -> Any:
    """Returns a small configuration of transformers."""
    import transformers

    return getattr(transformers, f"{prefix}Config")(**{**_SMALL, **fields})


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that makes a causal language model of a configuration."""
    import transformers

    is_listed = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if is_listed else transformers.AutoModelForImageTextToText


def save_family(path: Path, config: Any, *, seed: int = 0) -> None:
    """Saves a checkpoint with random weights, large enough that norms, biases and attention matter."""
    import torch

    config.architectures = None  # set by save_pretrained
    model = auto_class(config).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            values = 0.12 * noise
        else:
            values = 1 + 0.2 * noise if "norm" in name or "ln_" in name else 0.2 * noise
        parameter.data.copy_(values)
    model.save_pretrained(path)


def save_with_images(path: Path) -> None:
    """Saves a checkpoint of Gemma 4 for text and images."""
    import torch
    import transformers

    text = family_config("Gemma4Text", **TRANSFORMERS_FAMILIES["Gemma 4"][1])
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma4Config(text_config=text.to_dict(), vision_config={**vision, "head_dim": 16})
    model: Any = transformers.Gemma4ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(0.12 * noise if parameter.ndim > 1 else 1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    model.save_pretrained(path)


WITHOUT_A_CLASS_FOR_TEXT: dict[str, dict[str, Any]] = {
    "GlmOcr": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "MuseGlimmer": {"head_dim": 16, "sliding_window": 24},
    "MuseSpark": {
        "head_dim": 16,
        "sliding_window": 24,
        "moe_intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_hidden_size": 32,
    },
}
"""Prefix of classes for images, and fields of the text part, for which transformers has no causal language model."""


def save_without_images(path: Path, prefix: str) -> Any:
    """Saves the text part of such a model under the names of the whole.

    Returns: the whole in transformers, whose other parts have no values.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    text = family_config(f"{prefix}Text", **WITHOUT_A_CLASS_FOR_TEXT[prefix])
    audio = {"audio_config": {"out_hidden_size": text.hidden_size}} if prefix == "MuseSpark" else {}
    config = getattr(transformers, f"{prefix}Config")(text_config=text.to_dict(), **audio)
    config.architectures = [f"{prefix}ForConditionalGeneration"]
    config.save_pretrained(path)
    with torch.device("meta"):
        whole = getattr(transformers, config.architectures[0])(config).eval()
    whole.model.language_model = type(whole.model.language_model)(config.text_config).eval()
    whole.lm_head = torch.nn.Linear(text.hidden_size, text.vocab_size, bias=False)
    generator = torch.Generator().manual_seed(0)
    own = ("model.language_model.", "lm_head.")
    tensors = {name: tensor for name, tensor in whole.state_dict().items() if name.startswith(own)}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(0.12 * noise if tensor.ndim > 1 else ("norm" in name) + 0.2 * noise)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return whole


def save_as_part(path: Path, text_path: Path, architecture: str, model_type: str) -> None:
    """Saves a checkpoint of text as the text part of one for images, with a tensor for images.

    Args:
        path, text_path: its folder, and that of the text.
        architecture, model_type: of the whole; with a slash, the model type of the text part behind it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model_type, _, text_type = model_type.partition("/")
    config = json.loads((text_path / "config.json").read_text())
    config["model_type"] = text_type or config["model_type"]
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"architectures": [architecture], "model_type": model_type, "text_config": config})
    )
    tensors = load_file(text_path / "model.safetensors")
    if model_type == "mistral3":  # as transformers wrote them before 5.0
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        other = "vision_tower.x"
    else:
        renamed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
        other = "model.vision_tower.x"
    save_file({**renamed, other: torch.ones(3)}, path / "model.safetensors", {"format": "pt"})
