"""Sizes of models that determine the shapes of kernels, from public checkpoints."""

from typing import NamedTuple


class Dims(NamedTuple):
    """Sizes of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    value_dim: int | None = None  # of values that are the first numbers of the keys; None: that of a key

    @property
    def qkv_size(self) -> int:
        """Width of the packed queries, keys and values of a token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


MODELS = {
    "llama-3.1-8b": Dims(32, 8, 128, 4096, 14336, 128_256),
    "qwen3-0.6b": Dims(16, 8, 128, 1024, 3072, 151_936),
    "qwen3-4b": Dims(32, 8, 128, 2560, 9728, 151_936),
    "tiny": Dims(4, 2, 32, 64, 128, 512),
}
