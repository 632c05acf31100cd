"""Linear layers of a GGUF file that stay in its blocks: integers with a scale and an offset per group of inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.model.gguf_file import QUANTIZED_TYPES

_ONE_MATRIX = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections that are multiplied as one matrix."""

_MIXTRAL = ("w1", "w2", "w3")
"""Projections of Mixtral's experts; all others have names that end with "_proj"."""


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Which linear layers are in blocks.

    Attributes:
        kinds: name of a layer, such as `model.layers.0.mlp.up_proj` -> name of its type, a key of `QUANTIZED_TYPES`.
    """

    kinds: Mapping[str, str]

    @classmethod
    def of(cls, kinds: Mapping[str, str]) -> "GgufWeights":
        """Returns the layers that can stay in blocks; those that form a matrix with others do so if all are in blocks.

        kinds: the types of all matrices in blocks by the names of their layers.
        """
        kept = {}
        for name, kind in kinds.items():
            module, _, projection = name.rpartition(".")
            together = next((names for names in _ONE_MATRIX if projection in names), (projection,))
            if (projection.endswith("_proj") or projection in _MIXTRAL) and all(
                f"{module}.{other}" in kinds for other in together
            ):
                kept[name] = kind
        return cls(kept)

    def holds(self, module: str) -> bool:
        """Whether a linear layer is in blocks; `module` is its name."""
        return module in self.kinds

    def form(self, names: Iterable[str]) -> tuple[int, int]:
        """Returns bits of an integer and inputs of a group in the matrix that layers form: what suits all of them."""
        kinds = [QUANTIZED_TYPES[self.kinds[name]] for name in names]
        return max(kind.num_bits for kind in kinds), min(kind.group_size for kind in kinds)

    @property
    def num_bits(self) -> int:
        """The most bits of an integer."""
        return self.form(self.kinds)[0]
