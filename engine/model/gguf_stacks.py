"""Stacks of a GGUF file: llama.cpp has one tensor for all experts, or for norms of all heads, the decoder one for each.

The matrices of a stack, and its biases, follow one another, so each is a tensor too: `blk.0.ffn_up_exps.weight` of 8
experts is `blk.0.ffn_up_exps.0.weight` to `blk.0.ffn_up_exps.7.weight`. Files may have gate and up of an expert one
below the other, in `blk.0.ffn_gate_up_exps.weight`: rows of it are those of `ffn_gate_exps` and `ffn_up_exps`.
"""

import re
from collections.abc import Mapping

from engine.errors import CheckpointError
from engine.model.gguf_file import GgufHeader
from engine.model.tensor_entry import TensorEntry

_STACK = re.compile(r"((?:blk\.\d{1,9}\.)?)(\w+)\.(weight|bias)")
_GATE, _UP, _GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
_MAX_TENSORS = 1 << 18
"""The largest models on the hub have 60,000."""


def split_stacks(header: GgufHeader, sizes: Mapping[str, int]) -> dict[str, TensorEntry]:
    """Returns the tensors of a file with one for each member of a stack; stacks of another size stay as they are.

    sizes: name of a module such as `ffn_up_exps` -> number of members of its stacks.

    Raises: CheckpointError: there are too many.
    """
    split: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        found = _STACK.fullmatch(name)
        modules = () if found is None else (_GATE, _UP) if found[2] == _GATE_UP else (found[2],)
        size = sizes.get(modules[0], 0) if modules else 0
        if found is None or len(entry.shape) < 2 or entry.shape[0] != size or entry.shape[1] % len(modules):
            split[name] = entry
            continue
        count = size * len(modules)
        if len(split) + count > _MAX_TENSORS:
            raise CheckpointError(
                f"{header.path}: tensor {name}: stacks have more than {_MAX_TENSORS} matrices and vectors, the maximum"
            )
        num_bytes = (entry.stop - entry.start) // count
        shape = (entry.shape[1] // len(modules), *entry.shape[2:])
        for index in range(count):
            start, module = entry.start + index * num_bytes, modules[index % len(modules)]
            own_name = f"{found[1]}{module}.{index // len(modules)}.{found[3]}"
            if own_name in split:
                raise CheckpointError(f"{header.path}: tensor {name} is in {found[1]}{module}.{found[3]} too")
            split[own_name] = TensorEntry(entry.dtype, shape, start, start + num_bytes)
    return split
