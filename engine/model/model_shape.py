"""The sizes of a model that its KV cache, the runner and the planning of memory depend on, however it is computed."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.core.cache_groups import ONE_GROUP, CacheGroups


class LayerShape(NamedTuple):
    """Attention heads of one layer, on one rank.

    Attributes:
        num_heads, num_kv_heads, head_dim: of queries, and of keys and values.
        group: of `ModelShape.cache_groups`, those without a window first.
        value_dim: size of values that are the first numbers of the keys (latents) and stored once; None: values are
            stored, as long as keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: int = 0
    value_dim: int | None = None

    def kv_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of one token's keys and values, of numbers of so many bytes; 8-bit ones have an fp32 scale
        per head.
        """
        scale_bytes = 4 if item_bytes == 1 else 0
        num_parts = 2 if self.value_dim is None else 1
        return num_parts * self.num_kv_heads * (self.head_dim * item_bytes + scale_bytes)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, or of the shard of it that a rank computes.

    Attributes:
        vocab_size: columns of the logits; a shard's are those of the whole model.
        layers: heads of each layer that has a KV cache.
        cache_groups: how these layers share block tables.
        max_position_embeddings: context length in tokens.
        end_token_ids: ids that end an answer.
        checkpoint_dtype: name of the dtype of the stored weights that are not quantised.
        state_bytes: most memory of what the layers keep of one request besides keys and values.
    """

    vocab_size: int
    layers: tuple[LayerShape, ...]
    max_position_embeddings: int
    end_token_ids: frozenset[int]
    checkpoint_dtype: str
    state_bytes: int = 0
    cache_groups: CacheGroups = ONE_GROUP

    @property
    def widest_layer(self) -> LayerShape:
        """The layer whose queries have the most elements."""
        return max(self.layers, key=lambda layer: layer.num_heads * layer.head_dim)
