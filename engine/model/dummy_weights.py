"""Random weights that keep activations near unit scale, for benchmarks and tests without a checkpoint."""

from collections.abc import Iterable

import torch

from engine.model.checkpoint_part import CheckpointPart
from kernels.fp8_weights import FP8_DTYPE

FP8_STD = 64.0
"""Standard deviation of 8-bit values: seven of it equal the largest value of the format, 448."""


class RandomWeights:
    """Fills all parameters of a model.

    Every rank draws each whole matrix, with a separate seed, and keeps its shard. So the model does not depend on the
    number of ranks. While a matrix is drawn, it takes memory for one more.
    """

    def __init__(self, names: Iterable[str], seed: int) -> None:
        """Takes the names of all tensors of the model, and the seed of the first one in their sorted order."""
        self._seeds = {name: seed + index for index, name in enumerate(sorted(names))}

    def fill(self, parts: dict[str, CheckpointPart]) -> None:
        """Fills parts; those of one linear layer together."""
        for name, part in parts.items():
            generator = torch.Generator(part.tensor.device).manual_seed(self._seeds[name])
            if part.is_scale:
                columns = parts[name.removesuffix("_inv").removesuffix("_scale")].shape[1]
                part.tensor.fill_(columns**-0.5 / FP8_STD)
            elif len(part.shape) == 1:
                part.tensor.fill_(1.0 if "norm" in name else 0.0)
            elif part.tensor.dtype is FP8_DTYPE:
                values = _drawn(part, FP8_STD, generator, torch.float32)
                part.tensor.copy_(part.read(values.clamp_(-448.0, 448.0)))
            elif part.is_whole:
                part.tensor.normal_(std=part.shape[1] ** -0.5, generator=generator)
            else:
                part.tensor.copy_(part.read(_drawn(part, part.shape[1] ** -0.5, generator, part.tensor.dtype)))


def _drawn(part: CheckpointPart, std: float, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Draws a whole matrix."""
    matrix = torch.empty(part.shape, dtype=dtype, device=part.tensor.device)
    return matrix.normal_(std=std, generator=generator)
