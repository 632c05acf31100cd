"""What distinguishes families of models: a record that each module of `engine.model.families` fills."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.model.config_fields import ConfigFields
from engine.model.rope import RopeConfig
from kernels.delta_heads import DeltaHeads
from kernels.gates import ClampedGate, Gate

GATES: dict[str, Gate] = {"silu": "silu_and_mul", "gelu_pytorch_tanh": "gelu_and_mul"}
"""Gates by the name of their activation in config.json."""


# Several times the values of the largest models.
_MAX_EXPERTS = 4096
_MAX_INNER_SIZE = 2**22


@dataclass(frozen=True, slots=True)
class Mixture:
    """A feed-forward network that is a mixture of experts, each a gated network (arXiv:2101.03961).

    Attributes:
        num_experts: how many there are.
        top_k: how many a token uses.
        inner_size: intermediate units of an expert.
        normalizes: whether the probabilities of a token's experts are scaled to a sum of one.
        module: what the checkpoint calls it.
        router: what the checkpoint calls the router in it.
        projections: what the checkpoint calls gate, up and down of an expert.
        has_bias: whether the router and the layers of experts have biases.
        is_stacked: whether the checkpoint has all experts of a layer in one tensor, see `StackedLinear`, in which
            rows of gate and up alternate.
        clamped_gate: of experts; None: they have the gate of the model.
        shared_size: intermediate units of an expert beside them that all tokens use; None: there is none.
    """

    num_experts: int
    top_k: int
    inner_size: int
    normalizes: bool
    module: str = "mlp"
    router: str = "gate"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False
    is_stacked: bool = False
    clamped_gate: ClampedGate | None = None
    shared_size: int | None = None

    @classmethod
    def from_fields(
        cls,
        fields: ConfigFields,
        *,
        num_experts: str,
        inner_size: str,
        normalizes: bool,
        shared_size: str | None = None,
        **others: Any,
    ) -> "Mixture":
        """Reads the sizes.

        num_experts, inner_size and shared_size are names of fields; others are attributes with defaults.

        Raises: CheckpointError: a bad field, or more experts per token than there are.
        """
        number, top_k = fields.integer(num_experts, maximum=_MAX_EXPERTS), fields.integer("num_experts_per_tok")
        if top_k > number:
            raise fields.error("num_experts_per_tok", f"is {top_k}, {num_experts} is {number}")
        inner = fields.integer(inner_size, maximum=_MAX_INNER_SIZE)
        shared = None if shared_size is None else fields.integer(shared_size, maximum=_MAX_INNER_SIZE)
        return cls(number, top_k, inner, normalizes, shared_size=shared, **others)


class PostNormNames(NamedTuple):
    """What the checkpoint calls the norms of a layer behind attention, and before and behind the feed-forward network.

    They are those of models with norms behind both.
    """

    behind_attention: str = "post_attention_layernorm"
    before_mlp: str = "pre_feedforward_layernorm"
    behind_mlp: str = "post_feedforward_layernorm"


_COMMON_NAMES = PostNormNames()


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """Differences of a model from the common decoder. Tuples have one entry per layer.

    Attributes:
        sliding_windows: number of tokens a token attends to, including itself; None: all before it.
        ropes: rotation of queries and keys; None: no rotation.
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: whether each query and key head has an RMSNorm before the rotation.
        projection_norms: whether the queries of a token have one RMSNorm for all heads before the rotation, and the
            keys another.
        pre_norms: whether the inputs of attention and feed-forward network have RMSNorms.
        post_norms: whether the outputs of attention and feed-forward network have RMSNorms too, before they are added
            to the residual stream.
        post_norm_names: what the checkpoint calls them.
        norm_offset: added to the stored weights of all norms.
        fused_qkv, fused_gate_up: whether the checkpoint stores queries, keys and values as `qkv_proj`, and gate and up
            as `gate_up_proj`.
        attention_scale: factor of attention scores; None: 1 / sqrt(head_dim).
        attention_soft_cap, logit_soft_cap: limits of attention scores and logits x, which become cap * tanh(x / cap);
            None: they are unchanged.
        embedding_scale, residual_scale, logit_scale: factors of embeddings, of the output of attention and feed-forward
            network before it is added to the residual stream, and of logits.
        has_sinks: whether each query head has a score without a value, which takes part in the softmax.
        mixtures: mixtures of experts in place of feed-forward networks; empty: no layer has one.
        delta_rules: gated delta rules in place of attention; empty: all layers attend.
        attention_gate: whether results of attention are multiplied by the sigmoid of a gate, which `q_proj` has behind
            the query of each head.
        fused_qkvz, fused_ba: whether the checkpoint stores `in_proj_qkv` and `in_proj_z` of delta rules as
            `in_proj_qkvz`, and `in_proj_b` and `in_proj_a` as `in_proj_ba`, which have the rows of one key head, and of
            the value heads that share it, after those of another.
    """

    sliding_windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    projection_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    post_norm_names: PostNormNames = _COMMON_NAMES
    norm_offset: float = 0.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    has_sinks: bool = False
    mixtures: tuple[Mixture | None, ...] = ()
    delta_rules: tuple[DeltaHeads | None, ...] = ()
    attention_gate: bool = False
    fused_qkvz: bool = False
    fused_ba: bool = False

    @property
    def stream_unit(self) -> float:
        """The factor by which the residual stream is kept divided, which the norms after it remove.

        So no kernel multiplies: with norms of what is added it is the scale of embeddings, and the rest is in the
        weights of these norms; otherwise it is the scale of what is added, and the rest is in the embeddings.
        """
        return self.embedding_scale if self.post_norms else self.residual_scale


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        architecture: its entry of `architectures` in config.json.
        read_traits: reads the traits of a model from its config.json; raises CheckpointError for a bad field.
        defaults: values of fields that config.json may lack, as in the configuration class of `transformers`.
        defaults_of_null: values of fields that are null, of those that the configuration class replaces.
        activation_field: the field that names the activation of the feed-forward networks.
        intermediate_field: the field for the intermediate units of feed-forward networks that all tokens use.
        activations: the values of that field for which the decoder computes its models.
        activation_names: other names of activations in its files.
    """

    architecture: str
    read_traits: Callable[[ConfigFields], DecoderTraits]
    defaults: Mapping[str, Any]
    defaults_of_null: Mapping[str, Any] = field(default_factory=dict)
    activation_field: str = "hidden_act"
    intermediate_field: str = "intermediate_size"
    activations: tuple[str, ...] = tuple(GATES)
    activation_names: Mapping[str, str] = field(default_factory=dict)

    def activation(self, fields: ConfigFields) -> Any:
        """Returns what config.json, or else the default of the family, names as activation."""
        name = fields.with_defaults(dict(self.defaults)).raw(self.activation_field, "silu")
        return self.activation_names.get(name, name) if isinstance(name, str) else name

    def has_gate_of(self, fields: ConfigFields) -> bool:
        """Tells whether the decoder computes models with the activation."""
        activation = self.activation(fields)
        return isinstance(activation, str) and activation in self.activations


def num_layers(fields: ConfigFields) -> int:
    """Returns the number of layers."""
    return fields.integer("num_hidden_layers")


def windows_by_layer_type(
    fields: ConfigFields, window: int | None, default: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Returns the window of each layer: those that `layer_types` lists as sliding have it; without, the default.

    Raises: CheckpointError: another number of layers, or another type.
    """
    if "layer_types" not in fields:
        return default
    types = layer_types(fields, "full_attention", "sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def layer_types(fields: ConfigFields, *supported: str) -> list[str]:
    """Returns the types that the file lists.

    Raises: CheckpointError: another number of layers, or another type.
    """
    types, number = fields.raw("layer_types"), num_layers(fields)
    if not isinstance(types, list) or len(types) != number:
        raise fields.error("layer_types", f"is {types!r}, expected a list with one entry for each of {number} layers")
    if unknown := sorted({str(kind) for kind in types} - set(supported)):
        raise fields.error("layer_types", f"has {', '.join(unknown)}, supported are {', '.join(supported)}")
    return types


def sliding_window(fields: ConfigFields) -> int | None:
    """Returns the number of tokens of a window, if there is one."""
    return fields.integer("sliding_window") if "sliding_window" in fields else None


def same_ropes(fields: ConfigFields) -> tuple[RopeConfig, ...]:
    """Returns the rotation that all layers share."""
    return (RopeConfig.from_fields(fields),) * num_layers(fields)
