"""Random GGUF files: matrices of blocks that no quantiser has made."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.bench.gguf_writer import DTYPES, Tensor, metadata_of, plain, tensors_of, write_gguf

_BLOCKS = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)), "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)), "IQ3_S": (256, 110, (0,)), "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)), "TQ2_0": (256, 66, (64,)), "MXFP4": (32, 17, ()),
}  # fmt: skip
"""Numbers and bytes of a block, and where its fp16 numbers are."""

_SPREAD = {
    "Q4_0": 4, "Q4_1": 8, "Q5_0": 9, "Q5_1": 16, "Q8_0": 74, "Q2_K": 20, "Q3_K": 70, "Q4_K": 300, "Q5_K": 600,
    "IQ3_S": 70, "IQ4_NL": 60, "IQ4_XS": 1000, "TQ2_0": 1,
}  # fmt: skip
"""About how large numbers of random blocks are, in units of their fp16 numbers; others: Q6_K."""


def random_blocks(kind: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Returns a random matrix whose numbers are about 1 / sqrt(columns)."""
    numbers, num_bytes, halves = _BLOCKS[kind]
    data = torch.randint(0, 256, (rows * columns // numbers, num_bytes), dtype=torch.uint8, generator=generator)
    for start in halves:
        scales = torch.randn(len(data), 1, generator=generator) * columns**-0.5 / _SPREAD.get(kind, 1500)
        data[:, start : start + 2] = scales.half().view(torch.uint8)
    if kind == "MXFP4":
        data[:, 0] = 125 - round(math.log2(columns) / 2)
    return Tensor(kind, (rows, columns), data.numpy().tobytes())


def of_a_model_for_images(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns the metadata of a Qwen as those of the text part of a Qwen-VL, which have another name.

    The sections share out 32 rotated pairs in turn: pairs of Qwen3-VL that they leave out llama.cpp does not rotate.
    """
    alone = metadata["general.architecture"]
    return {
        **{key.replace(f"{alone}.", f"{architecture}.", 1): value for key, value in metadata.items()},
        "general.architecture": architecture,
        f"{architecture}.rope.dimension_sections": [11, 11, 10, 0],
        f"{architecture}.n_deepstack_layers": 0,
    }


def save_random_blocks(
    folder: Path,
    path: Path,
    kinds: Mapping[str, str],
    default: str,
    *,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint as a GGUF file with random matrices.

    kinds: part of a tensor's name -> its type; `default` has all other matrices.
    metadata: added to those of the checkpoint.
    """
    generator, tensors = torch.Generator().manual_seed(0), tensors_of(folder)
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in name and not name.endswith(".bias"):
            kind = next((kind for part, kind in kinds.items() if part in name), default)
            if kind in DTYPES:
                values = torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5
                tensors[name] = plain(values, kind)
            else:
                blocks = random_blocks(kind, math.prod(tensor.shape[:-1]), tensor.shape[-1], generator)
                tensors[name] = blocks._replace(shape=tensor.shape)
    write_gguf(path, {**metadata_of(folder), **(metadata or {})}, tensors)
