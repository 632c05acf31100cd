"""What describes an architecture in GGUF: fields of config.json, and names of tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model.gguf_metadata import GgufMetadata

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """An architecture in GGUF.

    Attributes:
        architecture: the entry of `architectures` in config.json.
        read_fields: returns the fields of config.json that not all architectures have; raises CheckpointError for a
            value that is not supported.
        names: names of the modules of a layer in the decoder, by those in the file, where they are not the usual ones;
            those of experts, and of norms of heads, have {} in place of their number. Of a tensor such as
            `attn_sinks.weight`, whose name in the decoder has another end, and of one without an end, the whole name.
        rotates_pairs: whether the rows of queries and keys of a head have another order: llama.cpp rotates neighbours.
        norm_offset: what llama.cpp adds to the weights of norms.
        rotates_parts: whether a part of a head may be rotated.
        model_names: names in the decoder of tensors of no layer, where they are not the usual ones; members of a stack
            have their number behind its name.
        model_type: as which transformers computes it; None: a family does.
    """

    architecture: str
    read_fields: Callable[[GgufMetadata], Fields]
    names: Mapping[str, str] = field(default_factory=dict)
    rotates_pairs: bool = False
    norm_offset: float = 0.0
    rotates_parts: bool = False
    model_names: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None

    @property
    def stacks(self) -> list[str]:
        """The modules of which the file has one tensor and the decoder several."""
        of_model = {name.split(".")[0] for name in self.model_names if name.count(".") > 1}
        return [*(module for module, name in self.names.items() if "{}" in name), *sorted(of_model)]

    def layer_name(self, module: str, expert: str | None, part: str | None) -> str | None:
        """Returns the name of a tensor of a layer in the decoder; None: it is unknown.

        Args:
            module: the module of the layer, such as `attn_q`.
            expert: number of the expert of which it is; None: of none.
            part: `weight`, `bias` or `scale`; None: the name has none.
        """
        tensor = module if part is None else f"{module}.{part}"
        whole, name = self.names.get(tensor), self.names.get(module, _LAYER_NAMES.get(module))
        if whole is None and name is not None and part is not None:
            whole = f"{name}.{part}"
        if whole is None or ("{}" in whole) != (expert is not None):
            return None
        return whole.format(expert)
