"""Finds layers that a checkpoint in integers has in 16 or 32 bits although its config.json does not list them.

GPTQModel and AutoAWQ leave layers out by the architecture, such as `in_proj_a` of Qwen3.5, and write no list of them.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model.checkpoint import FLOAT_DTYPES, Checkpoint, decoder_tensors
from engine.model.int_weights import IntWeights
from engine.model.module_patterns import ModuleNames
from engine.model.quantization_config import QuantizedWeights

_LAYOUTS = ("gptq", "awq")  # other tools list all such layers
_MATRIX, _INTEGERS = ".weight", ".qweight"


def without_unlisted_layers(stored: QuantizedWeights | None, checkpoint: Checkpoint) -> QuantizedWeights | None:
    """Returns the settings with layers as exceptions whose matrices the files have in 16 or 32 bits.

    Nothing changes without files; `check_weights` reports those that cannot be read.
    """
    if not isinstance(stored, IntWeights) or stored.layout not in _LAYOUTS:
        return stored
    try:
        tensors = {name: entry for name, _, _, entry in decoder_tensors(checkpoint)}
    except CheckpointError:
        return stored
    modules = {
        name.removesuffix(_MATRIX)
        for name, entry in tensors.items()
        if name.endswith(_MATRIX) and len(entry.shape) == 2 and entry.dtype in FLOAT_DTYPES
    }
    unlisted = frozenset(name for name in modules if f"{name}{_INTEGERS}" not in tensors and stored.holds(name))
    return replace(stored, exceptions=(*stored.exceptions, ModuleNames(unlisted))) if unlisted else stored
