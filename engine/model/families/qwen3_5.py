"""Qwen3-Next, and Qwen3.5, dense or with experts: three of four layers are gated delta rules (arXiv:2412.06464).

The other layers have gated attention.
"""

from dataclasses import replace
from typing import Any

from engine.model.config_fields import ConfigFields
from engine.model.families.qwen import sparse_layers
from engine.model.family import DecoderTraits, Family, Mixture, layer_types, num_layers, same_ropes
from kernels.delta_heads import DeltaHeads

_MAX_SIZE = 2**16  # of heads and their dimensions: several times those of the largest models
_MAX_CONV_WIDTH = 64
_LANES, _UNROLLED = 16, 4  # of which kernels compute whole multiples


def _qwen3_5(fields: ConfigFields) -> DecoderTraits:
    attention_bias = fields.flag("attention_bias", False)
    heads = _delta_heads(fields)
    return DecoderTraits(
        sliding_windows=(None,) * num_layers(fields),
        ropes=same_ropes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        norm_offset=1.0,
        delta_rules=tuple(None if attends else heads for attends in _attending(fields)),
        attention_gate=True,
    )


def _qwen3_5_moe(fields: ConfigFields) -> DecoderTraits:
    """A mixture in every layer."""
    return replace(_qwen3_5(fields), mixtures=(_mixture(fields, normalizes=True),) * num_layers(fields))


def _qwen3_next(fields: ConfigFields) -> DecoderTraits:
    """Mixtures as of Qwen2-MoE. Projections of a delta rule are fused; GGUF files divide one of them."""
    return replace(
        _qwen3_5(fields),
        mixtures=sparse_layers(fields, _mixture(fields, normalizes=fields.flag("norm_topk_prob", True))),
        fused_qkvz=fields.flag("fuses_qkvz", True),
        fused_ba=True,
    )


def _mixture(fields: ConfigFields, *, normalizes: bool) -> Mixture:
    return Mixture.from_fields(
        fields,
        num_experts="num_experts",
        inner_size="moe_intermediate_size",
        shared_size="shared_expert_intermediate_size",
        normalizes=normalizes,
    )


def _delta_heads(fields: ConfigFields) -> DeltaHeads:
    """Raises: CheckpointError: sizes that do not fit each other, or that kernels do not compute."""

    def size(name: str, multiple: int = 1) -> int:
        value = fields.integer(name, maximum=_MAX_SIZE)
        if value % multiple:
            raise fields.error(name, f"is {value}, expected a multiple of {multiple}; or use --model-impl transformers")
        return value

    num_key_heads, num_value_heads = size("linear_num_key_heads"), size("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise fields.error(
            "linear_num_value_heads", f"is {num_value_heads}, not a multiple of linear_num_key_heads {num_key_heads}"
        )
    return DeltaHeads(
        num_key_heads,
        size("linear_key_head_dim", _UNROLLED),
        num_value_heads,
        size("linear_value_head_dim", _LANES),
        fields.integer("linear_conv_kernel_dim", minimum=2, maximum=_MAX_CONV_WIDTH),
        is_tiled=fields.flag("tiles_linear_heads", False),  # of GGUF files, whose metadata become such fields
    )


def _attending(fields: ConfigFields) -> list[bool]:
    """Returns whether each layer attends, by `layer_types`, or else each `full_attention_interval`-th.

    Raises: CheckpointError: another number of entries than layers, another type, or no layer that attends.
    """
    number = num_layers(fields)
    if "layer_types" in fields:
        name = "layer_types"
        attends = [kind == "full_attention" for kind in layer_types(fields, "full_attention", "linear_attention")]
    else:
        name = "full_attention_interval"
        interval = fields.integer(name, 4)
        attends = [(layer + 1) % interval == 0 for layer in range(number)]
    if not any(attends):
        raise fields.error(name, f"gives none of {number} layers full_attention, which one must have")
    return attends


_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS: dict[str, Any] = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_ACTIVATIONS = ("silu",)  # transformers computes the convolution of the delta rule with it too

QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    _qwen3_5,
    {
        **_DEFAULTS,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    activations=_ACTIVATIONS,
)
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    _qwen3_5_moe,
    {**_EXPERTS, "vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
    intermediate_field="shared_expert_intermediate_size",  # no layer is dense
    activations=_ACTIVATIONS,
)
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    _qwen3_next,
    {
        **_EXPERTS,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    activations=_ACTIVATIONS,
)
