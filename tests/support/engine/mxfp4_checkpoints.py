"""gpt-oss checkpoints with experts in MXFP4, as OpenAI publishes them; transformers computes their values."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = "model.safetensors"
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantise_experts(original: Path, quantised: Path, twin: Path) -> None:
    """Quantises the experts of a checkpoint in 16 or 32 bits; folders `quantised` and `twin` are copies of it.

    quantised: gets codes and scales.
    twin: gets the values that transformers computes from them, in fp32.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = {}, {}
    for name, tensor in load_file(original / FILE).items():
        if not name.endswith("_proj") or ".experts." not in name:
            stored[name] = tensor
            plain[name] = tensor.float()
            continue
        blocks, scales = _blocks(tensor.float().transpose(1, 2).contiguous())
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(stored, quantised / FILE)
    save_file(plain, twin / FILE)
    config = json.loads((original / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


def _blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, out, in] fp32 -> blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32], uint8."""
    groups = weights.view(*weights.shape[:2], -1, 32)
    exponents = groups.abs().amax(dim=-1).log2().floor() - 2  # the largest value is 4 to 8 times the scale
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - _VALUES).abs().argmin(dim=-1) + 8 * (scaled < 0)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8)
