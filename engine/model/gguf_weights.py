"""Matrices of a GGUF file that stay in its blocks: integers with a scale and an offset per group of inputs."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.model.gguf_file import QUANTIZED_TYPES

_QKVZ, _BA, _FUSED_BA = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), "in_proj_ba"
"""Projections of the gated delta rule."""
_ONE_MATRIX = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), _QKVZ, _BA)
"""Projections that are multiplied as one matrix."""
_ALONE = ("embed_tokens", "lm_head")
_MIXTRAL = ("w1", "w2", "w3")
"""Projections of Mixtral's experts."""
_OTHER_NAMES = (*_MIXTRAL, *_QKVZ, *_BA, _FUSED_BA, *_ALONE)
"""Names of matrices that stay in blocks and do not end with "_proj"."""

_FACTOR_BYTES = {
    "Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q8_0": 2, "Q2_K": 36, "Q3_K": 18, "Q4_K": 20, "Q5_K": 20, "Q6_K": 18,
    "IQ4_NL": 2, "IQ4_XS": 10, "MXFP4": 8,
}  # fmt: skip
"""Bytes in which a CPU keeps scales and offsets of a block, at most."""
_SUPERBLOCK, _SUPERBLOCK_BYTES = 256, 36
"""Numbers of a superblock, and such bytes of one in a matrix whose projections have superblocks of several types."""


@dataclass(frozen=True, slots=True)
class GgufWeights:
    """Which linear layers, embedding and output head included, are in blocks.

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
            module, dot, projection = name.rpartition(".")
            together = next((names for names in _ONE_MATRIX if projection in names), (projection,))
            is_linear = projection.endswith("_proj") or projection in _OTHER_NAMES
            if is_linear and all(f"{module}{dot}{other}" in kinds for other in together):
                kept[name] = kind
        return cls(kept)

    def holds(self, module: str) -> bool:
        """Whether a linear layer is in blocks; `module` is its name."""
        return module in self.kinds

    def form(self, names: Iterable[str]) -> tuple[int, int]:
        """Returns bits of an integer and inputs of a group in the matrix that layers form: what suits all of them."""
        kinds = [QUANTIZED_TYPES[self.kinds[name]] for name in names]
        return max(kind.num_bits for kind in kinds), min(kind.group_size for kind in kinds)

    def is_microscaled(self, names: Iterable[str]) -> bool:
        """Whether the matrix that layers form is an expert's in MXFP4, which operations take as it is."""
        return all(".experts." in name and self.kinds[name] == "MXFP4" for name in names)

    @property
    def has_microscaled_experts(self) -> bool:
        """Whether there are such matrices."""
        return any(self.is_microscaled((name,)) for name in self.kinds)

    def packed_bytes(self, names: Collection[str], num_rows: int, num_columns: int, *, is_compact: bool) -> int:
        """Returns the bytes in memory of the matrix that layers form.

        is_compact: whether the matrix takes about the bytes of the file, as on a CPU. Otherwise scales and offsets
            are two fp32 per group, and integers have 4 or 8 bits.
        """
        num_weights = num_rows * num_columns
        if self.is_microscaled(names):
            block = QUANTIZED_TYPES["MXFP4"]
            return num_weights // block.numbers * block.num_bytes
        num_bits, group_size = self.form(names)
        factor_bits = self._factor_bits(names)
        if not is_compact:
            num_bits, factor_bits = 4 if num_bits == 4 else 8, 64 / group_size
        return num_weights * num_bits // 8 + int(num_weights * factor_bits) // 8

    def _factor_bits(self, names: Iterable[str]) -> float:
        """Returns the bits per weight in which a CPU keeps scales and offsets of the matrix that layers form."""
        kinds = {self.kinds[name] for name in names}
        if len(kinds) == 1:
            (kind,) = kinds
            return 8 * _FACTOR_BYTES[kind] / QUANTIZED_TYPES[kind].numbers
        if all(QUANTIZED_TYPES[kind].numbers == _SUPERBLOCK for kind in kinds):
            return 8 * _SUPERBLOCK_BYTES / _SUPERBLOCK
        return 64 / min(QUANTIZED_TYPES[kind].group_size for kind in kinds)

    @property
    def num_bits(self) -> int:
        """The most bits of an integer."""
        return self.form(self.kinds)[0]
