"""A checkpoint in any of its formats: what the engine reads of it, and which class reads which format.

A path identifies a checkpoint. What its fields mean is checked by `ModelConfig`, its tensors by `engine.model.weights`,
and its tokenizer by `TokenizerFiles`.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from engine.errors import CheckpointError
from engine.model.checkpoint_folder import CheckpointFolder
from engine.model.config_fields import ConfigFields
from engine.model.gguf_checkpoint import GgufCheckpoint, is_gguf
from engine.model.tensor_entry import TensorEntry


class Checkpoint(Protocol):
    """A checkpoint on this machine. Every method raises CheckpointError for a file that it cannot read."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    def config(self) -> ConfigFields:
        """Returns the fields of config.json."""
        ...

    def generation_config(self) -> ConfigFields | None:
        """Returns the fields of generation_config.json; None: there is none."""
        ...

    def description(self) -> bytes:
        """Returns what config is read from: two models that differ in it are different."""
        ...

    def require_tokenizer(self) -> None:
        """Raises CheckpointError if there is no tokenizer."""
        ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the files for `TokenizerFiles` by their names, unchecked; none without a tokenizer."""
        ...

    def named_end_token_id(self) -> int | None:
        """Returns the id of the tokenizer's `eos_token`; None: it names none, or config has it."""
        ...

    def weights_files(self) -> list[Path]:
        """Returns the files with the weights; raises CheckpointError if one is missing."""
        ...

    def tensors(self, file: Path) -> dict[str, TensorEntry]:
        """Returns the tensors in one of `weights_files` by their names in it, checked against the size of the file."""
        ...

    def decoder_names(self) -> Callable[[str], str | None]:
        """Returns what maps the name of a tensor in a file to the decoder's; None: the decoder does not need it."""
        ...


def decoder_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Path, str, TensorEntry]]:
    """Yields the tensors of the decoder: name there, file, name in the file, and entry.

    Raises: CheckpointError: a file is missing, unreadable or broken.
    """
    decoder_name = checkpoint.decoder_names()
    for file in checkpoint.weights_files():
        for stored, entry in checkpoint.tensors(file).items():
            if (name := decoder_name(stored)) is not None:
                yield name, file, stored, entry


FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of tensors in 16 or 32 bits, and names of their dtypes."""


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Returns the name of the dtype of the largest matrix in 16 or 32 bits.

    It counts where config.json states none, as gpt-oss's. float32 if there are no weights, which will be random;
    `check_weights` reports files that cannot be read.
    """
    try:
        entries = [entry for file in checkpoint.weights_files() for entry in checkpoint.tensors(file).values()]
    except CheckpointError:
        return "float32"
    sizes = [(math.prod(entry.shape), FLOAT_DTYPES[entry.dtype]) for entry in entries if entry.dtype in FLOAT_DTYPES]
    return max(sizes)[1] if sizes else "float32"


def open_checkpoint(path: Path) -> Checkpoint:
    """Returns the reader of a folder, or of a file in llama.cpp's format."""
    return GgufCheckpoint(path) if is_gguf(path) else CheckpointFolder(path)
