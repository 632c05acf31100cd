"""The configuration of a model, read from its config.json and checked; the same fields for all architectures."""

from dataclasses import dataclass
from pathlib import Path

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.model.architectures import FAMILIES
from engine.model.checkpoint import open_checkpoint, stored_dtype
from engine.model.config_fields import ConfigFields
from engine.model.end_tokens import end_token_ids
from engine.model.family import GATES, DecoderTraits, Family
from engine.model.model_shape import LayerShape, ModelShape
from engine.model.output_head import has_own_head
from engine.model.quantization_config import QuantizedWeights, read_quantization_config
from engine.model.text_part import end_token_defaults, text_fields, ties_by_class
from engine.model.unlisted_layers import without_unlisted_layers
from kernels.gates import Gate

# Several times the values of the largest models; beyond them even the shapes of the weights cannot be handled.
_MAX_LAYERS = 1024
_MAX_HEADS = 65_536
_MAX_HEAD_DIM = 8192
_MAX_HIDDEN_SIZE = 2**22
_MAX_VOCAB_SIZE = 2**24
_MAX_POSITIONS = 2**27

_FP32_BYTES = 4
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        max_position_embeddings: context length in tokens.
        gate: the operation of its feed-forward networks.
        checkpoint_dtype: name of the dtype of the stored weights that are not quantised: as config.json states it, or
            else that of the largest matrix.
        end_token_ids: ids that end an answer; see `engine.model.end_tokens`.
        quantized: how linear layers are quantised, and which; None if the checkpoint is not quantised.
        traits: what distinguishes the family of the model.
        cache_groups, layer_groups: how layers share block tables, and the group of each; empty: all are in one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    gate: Gate
    traits: DecoderTraits
    checkpoint_dtype: str
    end_token_ids: frozenset[int]
    quantized: QuantizedWeights | None = None
    cache_groups: CacheGroups = ONE_GROUP
    layer_groups: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Reads config.json and, if present, generation_config.json.

        Raises: CheckpointError: a missing, invalid or unsupported field.
        """
        checkpoint = open_checkpoint(path)
        whole = checkpoint.config()
        fields = text_fields(whole)
        family = _family(fields)
        stated, fields = fields, fields.with_defaults({**family.defaults, **end_token_defaults(whole)})
        fields = fields.replaced({name: value for name, value in family.defaults_of_null.items() if name not in fields})
        hidden_size = fields.integer("hidden_size", maximum=_MAX_HIDDEN_SIZE)
        num_heads = fields.integer("num_attention_heads", maximum=_MAX_HEADS)
        num_kv_heads = fields.integer("num_key_value_heads", num_heads, maximum=_MAX_HEADS)
        if num_heads % num_kv_heads:
            raise fields.error(
                "num_attention_heads", f"is {num_heads}, not a multiple of num_key_value_heads {num_kv_heads}"
            )
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error("hidden_size", f"is {hidden_size}, not a multiple of num_attention_heads {num_heads}")
        head_dim = fields.integer("head_dim", hidden_size // num_heads, maximum=_MAX_HEAD_DIM)
        if head_dim % 2:
            raise fields.error("head_dim", f"is {head_dim}, expected an even number: rotary embeddings rotate pairs")
        if not family.has_gate_of(fields):
            raise fields.error(
                family.activation_field,
                f"is {family.activation(fields)!r}, supported are {', '.join(family.activations)}; or --model-impl "
                "transformers",
            )
        dtype = fields.raw("dtype", fields.raw("torch_dtype", None))
        if dtype is None:
            dtype = stored_dtype(checkpoint)
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise fields.error("dtype", f"is {dtype!r}, supported are {', '.join(_DTYPES)}")
        num_layers = fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)
        traits = family.read_traits(fields)
        positions = fields.integer("max_position_embeddings", maximum=_MAX_POSITIONS)
        for rope in set(traits.ropes) - {None}:
            assert rope is not None
            rope.check(head_dim)
            if rope.rope_type == "yarn":  # cards add it to the file and leave the number of positions as it was
                positions = max(positions, int(rope.factor * rope.original_max_position_embeddings))
        if positions > _MAX_POSITIONS:
            raise fields.error(
                "max_position_embeddings", f"times factor is {positions}, the maximum is {_MAX_POSITIONS}"
            )
        vocab_size = fields.integer("vocab_size", maximum=_MAX_VOCAB_SIZE)
        return cls(
            architecture=family.architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.integer(family.intermediate_field, maximum=_MAX_HIDDEN_SIZE),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=(
                (ties_by_class(whole) or fields.flag("tie_word_embeddings", False)) and not has_own_head(checkpoint)
            ),
            gate=GATES[family.activation(fields)],
            traits=traits,
            checkpoint_dtype=dtype,
            end_token_ids=end_token_ids(checkpoint, stated, fields, vocab_size),
            quantized=without_unlisted_layers(read_quantization_config(fields), checkpoint),
        )

    @property
    def shape(self) -> ModelShape:
        """What cache, runner and memory planning depend on."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        states = [rule.state_size for rule in self.traits.delta_rules if rule is not None]
        return ModelShape(
            vocab_size=self.vocab_size,
            layers=tuple(LayerShape(*heads, self.group_of(index)) for index in self.attention_layers),
            state_bytes=_FP32_BYTES * sum(states),
            cache_groups=self.cache_groups,
            max_position_embeddings=self.max_position_embeddings,
            end_token_ids=self.end_token_ids,
            checkpoint_dtype=self.checkpoint_dtype,
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have a KV cache."""
        rules = self.traits.delta_rules
        return tuple(index for index in range(self.num_layers) if not rules or rules[index] is None)

    def group_of(self, layer: int) -> int:
        """Returns the cache group of a layer."""
        return self.layer_groups[layer] if self.layer_groups else 0


def _family(fields: ConfigFields) -> Family:
    names = fields.raw("architectures")
    for architecture, family in FAMILIES.items():
        if isinstance(names, list) and architecture in names:
            return family
    raise fields.error("architectures", f"is {names!r}, supported are {', '.join(FAMILIES)}; see docs/models.md")
