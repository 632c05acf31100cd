"""What llama.cpp's converter changes in models of transformers before it maps the names of their tensors."""

import re
from collections.abc import Mapping
from typing import Any

import torch


def latent_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of heads over latents, as llama.cpp attends: all heads share one key, which is a latent."""
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    values = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
    }
    if (scale := config["rope_parameters"].get("mscale_all_dim")) is not None:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    if "n_routed_experts" not in config:  # a dense model
        values |= {
            "leading_dense_block_count": config["num_hidden_layers"],
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_count": 0,
        }
    return values


def split_expansions(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with the expansions of latents to keys and to values apart, those of keys transposed."""
    split = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            split[name] = tensor
            continue
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        heads = tensor.view(config["num_attention_heads"], sum(sizes), -1)
        keys, values = heads[:, : sizes[0]], heads[:, sizes[0] :]
        split[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
        split[name.replace("kv_b", "v_b")] = values.contiguous()
    return split


def with_one_added_to_norms(tensors: dict[str, torch.Tensor], _: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with weights of norms as llama.cpp multiplies by them."""
    return {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


def with_stacked_norms(tensors: dict[str, torch.Tensor], _: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with one for the norms of all heads of queries or keys."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".norms." not in name}
    for name in tensors:
        prefix, found, rest = name.partition(".norms.0.")
        if found:
            norms = (f"{prefix}.norms.{head}.{rest}" for head in range(len(tensors)))
            stacked[f"{prefix}.{rest}"] = torch.stack([tensors[norm] for norm in norms if norm in tensors])
    return stacked


def granite_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a Granite with layers that keep a state has besides fields; such layers have no heads of keys."""
    kinds = config["layer_types"]
    values: dict[str, Any] = {
        "attention.head_count_kv": [
            config["num_key_value_heads"] if kind in ("attention", "full_attention") else 0 for kind in kinds
        ],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
    }
    if not config["num_local_experts"]:
        values |= {"expert_count": None, "expert_used_count": None, "expert_shared_feed_forward_length": None}
    return values


def split_granite(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with gate and up apart, and those of layers with a state as llama.cpp computes them."""
    split: dict[str, torch.Tensor] = {}
    shared = "mlp.shared_experts" if config["num_local_experts"] else "mlp"
    for name, tensor in with_states(tensors, config.get("mamba_n_groups", 1)).items():
        prefix, found, _ = name.partition(".input_linear.")
        module = f"{prefix.rpartition('.')[0]}.{'mlp.experts' if 'block_sparse_moe' in name else shared}"
        if found:
            gate, up = tensor.chunk(2, dim=-2)
            split |= {f"{module}.gate_proj.weight": gate.contiguous(), f"{module}.up_proj.weight": up.contiguous()}
        elif name.endswith("shared_mlp.output_linear.weight"):
            split[f"{name.partition('shared_mlp')[0]}{shared}.down_proj.weight"] = tensor
        else:
            split[name] = tensor
    return split


def with_states(tensors: dict[str, torch.Tensor], num_groups: int) -> dict[str, torch.Tensor]:
    """Returns the tensors with those of Mamba as llama.cpp computes them."""
    changed = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            tensor = -torch.exp(tensor)[:, None]
        if name.endswith(".D"):
            tensor = tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(num_groups, -1)
        changed[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return changed


def gemma4_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of both kinds of layers, and those of feed-forward networks."""
    kinds, own = config["layer_types"], next(iter(config["per_layer_config"].values()))
    num_layers, num_shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    heads, size = config["num_key_value_heads"], config["intermediate_size"]
    values: dict[str, Any] = {
        "attention.key_length": own["head_dim"],
        "attention.value_length": own["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
    }
    if config["use_double_wide_mlp"]:
        values["feed_forward_length"] = [size] * (num_layers - num_shared) + [2 * size] * num_shared
    if "num_key_value_heads" in own:
        both = {"sliding_attention": heads, "full_attention": own["num_key_value_heads"]}
        values["attention.head_count_kv"] = [both[kind] for kind in kinds]
    if config["enable_moe_block"]:
        values |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return values


def rename_gemma4(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with names of their scales, and divisors of frequencies in layers without a window."""
    renamed = {}
    for name, tensor in tensors.items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        for end, stored in ((".router.scale", "ffn_gate_inp"), (".router.per_expert_scale", "ffn_down_exps")):
            if name.endswith(end):
                renamed[f"blk.{layer}.{stored}.scale"] = tensor
                break
        else:
            has_end = name.endswith((".weight", ".bias"))
            renamed[name if has_end else f"{name}.weight"] = tensor
    size = next(iter(config["per_layer_config"].values()))["head_dim"]
    num_rotated = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    renamed["rope_freqs.weight"] = torch.tensor([1.0] * num_rotated + [1e30] * (size // 2 - num_rotated))
    return renamed


FALCON_MULTIPLIERS: dict[str, Any] = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_n_groups": 2,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 2.0,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 0.5],
    "mlp_multipliers": [2.0, 0.5],
}
"""Powers of two, by which a product is exact wherever it is."""


def multiply_falcon(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with the multipliers of the configuration in the weights."""
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    inner, of_groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = torch.tensor([inner, inner, of_groups, of_groups, config["mamba_n_heads"]])
    rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(parts)[:, None]
    changed = {}
    for name, tensor in with_states(tensors, config["mamba_n_groups"]).items():
        module = name.split(".")[-2]
        tensor = tensor * factors.get(module, 1.0) if tensor.ndim == 2 else tensor
        changed[name] = tensor * rows if module == "in_proj" else tensor
    return changed


def nemotron_h_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what each layer is: one with heads of keys, one with a feed-forward network, or one with a state."""
    kinds, sizes = config["layers_block_type"], {"mlp": "intermediate_size", "moe": "moe_intermediate_size"}
    values: dict[str, Any] = {
        "attention.head_count_kv": [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [config[sizes[kind]] if kind in sizes else 0 for kind in kinds],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }
    if "moe" not in kinds:
        values |= {"expert_count": None}
    return values


def rename_nemotron_h(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with the names of the first checkpoints, which the converter knows."""
    renamed = {}
    for name, tensor in with_states(tensors, config["n_groups"]).items():
        name = re.sub(r"^(model|backbone)\.", "backbone.", name)
        name = re.sub(r"^backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name)
        renamed[name.replace(".dt_proj.bias", ".dt.bias")] = tensor
    return renamed


def gemma3n_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what differs by layer."""
    pattern = torch.tensor(config["activation_sparsity_pattern"], dtype=torch.float32)
    return {
        "feed_forward_length": config["intermediate_size"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "activation_sparsity_scale": (2**0.5 * torch.erfinv(2 * pattern - 1)).tolist(),  # quantiles
    }


def stack_gemma3n(tensors: dict[str, torch.Tensor], _: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors with projections of all streams in one."""
    stacked = {}
    for name, tensor in tensors.items():
        prefix, found, rest = name.partition("projections.0.")
        if found:
            streams = [tensors[f"{prefix}projections.{stream}.{rest}"] for stream in range(3)]
            stacked[f"{prefix}projections.{rest}"] = torch.stack(streams)
        elif "projections." not in name:
            stacked[name if name.endswith(("weight", "bias")) else f"{name}.weight"] = tensor
    return stacked
