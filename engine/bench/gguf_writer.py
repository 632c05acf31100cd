"""Writes GGUF files: any metadata and tensors, or a checkpoint of `transformers` as llama.cpp converts it.

The engine only reads the format (`engine.model.gguf_file`), and nothing of that reader is used to write: tests of it
have an independent truth. llama.cpp reads these files too (tests/integration/test_llama_cpp.py).
"""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.bench import gguf_gpt_oss, gguf_granite, gguf_qwen35
from engine.bench.gguf_gpt_oss import Stack, stacks_of
from engine.model.gguf_checkpoint import GgufCheckpoint
from engine.model.gguf_joint import with_joint_tensors
from engine.model.gguf_tensors import GgufTensors

TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ3_S": 21, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral3", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Phi3ForCausalLM": "phi3", "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2", "MixtralForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3moe", "GptOssForCausalLM": "gpt-oss", "Qwen3_5ForCausalLM": "qwen35",
    "Qwen2MoeForCausalLM": "qwen2moe", "Qwen3NextForCausalLM": "qwen3next", "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Glm4ForCausalLM": "glm4", "GemmaForCausalLM": "gemma",
}  # fmt: skip
_ALIGNMENT = 32  # of files that do not set general.alignment
_ROTATED_IN_PAIRS = ("llama", "mistral3", "smollm3", "granite")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_WITH_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OF_ARCHITECTURE = {
    "gemma2": _WITH_POST_NORMS,
    "gemma3": _WITH_POST_NORMS,
    "olmo2": _WITH_POST_NORMS,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    **dict.fromkeys(gguf_qwen35.ARCHITECTURES, gguf_qwen35.NAMES),
}


class Tensor(NamedTuple):
    """A tensor in a file: its type, its shape beginning with the outermost dimension, and its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def plain(tensor: torch.Tensor, kind: str) -> Tensor:
    """Returns a tensor in F32, F16 or BF16."""
    data = tensor.to(DTYPES[kind]).contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(kind, tuple(tensor.shape), data)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a file: integers as u32 or i32, floats as f32."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _string(key) + _value(value)
    offset = 0
    for name, tensor in tensors.items():
        header += _string(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", TYPE_NUMBERS[tensor.kind], offset)
        offset += -(-len(tensor.data) // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        for part in (header, *(tensor.data for tensor in tensors.values())):
            file.write(part)
            file.write(bytes(-len(part) % _ALIGNMENT))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
        case [] | [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [*numbers]:
            return struct.pack(f"<IIQ{len(numbers)}i", 9, 5, len(numbers), *numbers)
    raise TypeError(value)


def metadata_of(folder: Path) -> dict[str, Any]:
    """Returns the metadata of a checkpoint, and of its tokenizer if it has one."""
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["architectures"][0]]
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(whole.get("rope_theta", 10000.0)),
    }
    if name != "qwen35moe":  # whose config.json has no such field
        values["feed_forward_length"] = config["intermediate_size"]
    if not name.startswith("gemma"):
        values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if "head_dim" in config and name not in ("granite", "phi3"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    values |= _own_metadata(name, config, rope)
    metadata = {"general.architecture": name} | {f"{name}.{key}": value for key, value in values.items()}
    if (eos := config.get("eos_token_id")) is not None:
        metadata["tokenizer.ggml.eos_token_id"] = eos
    if (folder / "tokenizer.json").exists():
        metadata |= tokenizer_metadata(folder)
    return metadata


def _own_metadata(name: str, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Returns what llama.cpp's converter writes for this architecture only."""
    values: dict[str, Any] = {}
    if name == "granite":
        values = {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        values = {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if name == "gpt-oss":
        values |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if name in gguf_qwen35.ARCHITECTURES:
        values |= gguf_qwen35.metadata_of(name, config)
    if name == "phi3":
        original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
        values["rope.scaling.original_context_length"] = original
    if name in ("phi3", "gemma2", "gemma3", "gpt-oss") or "Olmo3ForCausalLM" in config["architectures"]:
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if name == "gemma2":
        values["attn_logit_softcapping"] = config["attn_logit_softcapping"]
    if config.get("final_logit_softcapping"):
        values["final_logit_softcapping"] = config["final_logit_softcapping"]
    if "Olmo3ForCausalLM" in config["architectures"]:
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return values


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Returns the metadata of a tokenizer whose tokens are byte-level; one of whole words has no merges."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"].get("merges", ())],
        "tokenizer.ggml.add_bos_token": False,
    }
    if "pad_token" in config:
        metadata["tokenizer.ggml.padding_token_id"] = tokens.index(config["pad_token"])
    if "chat_template" in config:
        metadata["tokenizer.chat_template"] = config["chat_template"]
    return metadata


def tensors_of(folder: Path, kind: str = "F32") -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint as llama.cpp's converter stores them.

    Args:
        folder: has one file of weights.
        kind: type of matrices; vectors and experts are in F32, or MXFP4 if they are in the checkpoint.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in list(file.keys())}
        if architecture == "gpt-oss":
            experts, used = stacks_of(stored)
            tensors |= {name: _expert_tensor(stack) for name, stack in experts.items()}
            stored = {name: tensor for name, tensor in stored.items() if name not in used}
        if architecture in gguf_qwen35.ARCHITECTURES:
            stored = gguf_qwen35.as_llama_cpp_has_them(stored, config)
        for name, tensor in stored.items():
            module, _, part = name.rpartition(".")
            if ".experts." in module:
                _, _, layer, _, _, expert, projection = module.split(".")
                stacks.setdefault(f"blk.{layer}.ffn_{_EXPERTS[projection]}_exps.weight", {})[int(expert)] = tensor
                continue
            heads = num_heads.get(module.rpartition(".")[2])
            if architecture in _ROTATED_IN_PAIRS and heads is not None:
                tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            if architecture.startswith("gemma") and module.endswith("norm"):
                tensor = tensor.float() + 1
            if module.endswith("shared_expert_gate"):
                tensor = tensor.squeeze(0)
            if part == "A_log":  # its name there has no end
                tensors[gguf_name(module, architecture)] = plain(tensor, "F32")
                continue
            if part == "dt_bias":
                module, part = f"{module}.dt_bias", "bias"
            if part == "sinks":
                module, part = f"{module}.sinks", "weight"
            is_matrix = tensor.ndim == 2 and not module.endswith("conv1d")
            tensors[f"{gguf_name(module, architecture)}.{part}"] = plain(tensor, kind if is_matrix else "F32")
    for name, matrices in stacks.items():
        tensors[name] = plain(torch.stack([matrices[number] for number in range(len(matrices))]), "F32")
    rope = config.get("rope_parameters") or {}
    if "long_factor" in rope:
        for length in ("long", "short"):
            factors = torch.tensor(rope[f"{length}_factor"])
            tensors[f"rope_factors_{length}.weight"] = plain(factors, "F32")
    return tensors


def _expert_tensor(stack: Stack) -> Tensor:
    if not stack.is_in_blocks:
        return plain(stack.tensor, "F32")
    *outer, num_bytes = stack.tensor.shape
    return Tensor("MXFP4", (*outer, num_bytes // 17 * 32), stack.tensor.numpy().tobytes())


def gguf_name(module: str, architecture: str) -> str:
    """Returns llama.cpp's name of a module."""
    if module in _NAMES:
        return _NAMES[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{_OF_ARCHITECTURE.get(architecture, {}).get(rest, _NAMES.get(rest, rest))}"


def save_gguf(folder: Path, path: Path, kind: str = "F32") -> None:
    """Writes a checkpoint as a GGUF file with matrices in F32, F16 or BF16; vectors are in F32."""
    write_gguf(path, metadata_of(folder), tensors_of(folder, kind))


def save_twin(path: Path, original: Path, folder: Path) -> None:
    """Writes a copy of the folder that a GGUF file was made of, with the numbers that are in the file."""
    checkpoint = GgufCheckpoint(path)
    entries, names = checkpoint.tensors(path), checkpoint.decoder_names()
    stored = GgufTensors(path, entries, checkpoint.layout)
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {str(names(name)): stored.get_tensor(name).contiguous() for name in entries if names(name) is not None}
    weights = {name: tensor[...].contiguous() for name, tensor in with_joint_tensors(weights).items()}
    match checkpoint.config().raw("architectures"):
        case ["GptOssForCausalLM"]:
            weights = gguf_gpt_oss.as_transformers_has_them(weights)
        case ["Qwen3NextForCausalLM" | "Qwen3_5ForCausalLM" | "Qwen3_5MoeForCausalLM"]:
            weights = gguf_qwen35.as_transformers_has_them(weights, checkpoint.config().values)
        case ["GraniteMoeForCausalLM" | "GraniteMoeSharedForCausalLM" | "GraniteMoeHybridForCausalLM"]:
            weights = gguf_granite.as_transformers_has_them(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
