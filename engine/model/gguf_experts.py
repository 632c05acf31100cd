"""Experts of a GGUF file: llama.cpp stacks a layer's projections in one tensor, the decoder loads each on its own.

The matrices of a stack, and its biases, follow one another, so each is a tensor too: `blk.0.ffn_up_exps.weight` of 8
experts is `blk.0.ffn_up_exps.0.weight` to `blk.0.ffn_up_exps.7.weight`.
"""

import re

from engine.errors import CheckpointError
from engine.model.gguf_file import GgufHeader
from engine.model.tensor_entry import TensorEntry

_STACK = re.compile(r"(blk\.\d{1,9}\.ffn_(?:gate|up|down)_exps)\.(weight|bias)")
_NUM_DIMENSIONS = {"weight": 3, "bias": 2}
_MAX_TENSORS = 1 << 18
"""The largest models on the hub have 60,000."""


def split_experts(header: GgufHeader, num_experts: int) -> dict[str, TensorEntry]:
    """Returns the tensors of a file with a matrix and a bias per expert; stacks of another number stay as they are.

    Raises: CheckpointError: there are too many.
    """
    split: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        found = _STACK.fullmatch(name)
        if found is None or len(entry.shape) != _NUM_DIMENSIONS[found[2]] or entry.shape[0] != num_experts:
            split[name] = entry
            continue
        if len(split) + num_experts > _MAX_TENSORS:
            raise CheckpointError(
                f"{header.path}: tensor {name}: experts have more than {_MAX_TENSORS} matrices and biases, the maximum"
            )
        num_bytes = (entry.stop - entry.start) // num_experts
        for expert in range(num_experts):
            start = entry.start + expert * num_bytes
            split[f"{found[1]}.{expert}.{found[2]}"] = TensorEntry(
                entry.dtype, entry.shape[1:], start, start + num_bytes
            )
    return split
