"""Random GGUF files: matrices of blocks that no quantiser has made."""

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.bench.gguf_writer import DTYPES, Tensor, metadata_of, plain, tensors_of, write_gguf

_BLOCKS = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)), "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)),
}  # fmt: skip
"""Numbers and bytes of a block, and where its fp16 numbers are."""

_SPREAD = {"Q4_0": 4, "Q4_1": 8, "Q5_0": 9, "Q5_1": 16, "Q8_0": 74, "Q2_K": 20, "Q3_K": 70, "Q4_K": 300, "Q5_K": 600}
"""About how large numbers of random blocks are, in units of their fp16 numbers; others: Q6_K."""


def random_blocks(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Returns a random matrix whose numbers are about 1 / sqrt(columns)."""
    numbers, num_bytes, halves = _BLOCKS[kind]
    data = torch.randint(0, 256, (rows * columns // numbers, num_bytes), dtype=torch.uint8, generator=generator)
    for start in halves:
        scales = torch.randn(len(data), 1, generator=generator) * columns**-0.5 / _SPREAD.get(kind, 1500)
        data[:, start : start + 2] = scales.half().view(torch.uint8)
    return Tensor(kind, (rows, columns), data.numpy().tobytes())


def save_random_blocks(folder: Path, path: Path, kinds: Mapping[str, str], default: str, *, seed: int = 0) -> None:
    """Writes a checkpoint as a GGUF file with random matrices.

    kinds: part of a tensor's name -> its type; `default` has all other matrices.
    """
    generator, tensors = torch.Generator().manual_seed(seed), tensors_of(folder)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2:
            kind = next((kind for part, kind in kinds.items() if part in name), default)
            if kind in DTYPES:
                values = torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5
                tensors[name] = plain(values, kind)
            else:
                tensors[name] = random_blocks(kind, *tensor.shape, generator)
    write_gguf(path, metadata_of(folder), tensors)
