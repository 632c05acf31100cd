"""Finds out whether a checkpoint has an output head of its own, whatever config.json says of tied embeddings."""

import functools
from pathlib import Path

from engine.errors import CheckpointError
from engine.model.checkpoint import Checkpoint, decoder_tensors
from engine.model.checkpoint_file import open_regular
from engine.model.tensor_entry import TensorEntry

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""Names of both modules in the decoder."""

EMBEDDING_WEIGHT, HEAD_WEIGHT = f"{EMBEDDING}.weight", f"{HEAD}.weight"
"""Names of their matrices."""

_CHUNK_BYTES = 1 << 18  # stays in a CPU cache


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether the files have an output head with other numbers than the embedding.

    `transformers` keeps such a head even if config.json says that it is tied. Files with one of both, or with a copy,
    have none; nor has a checkpoint without weights, which will be random. `check_weights` reports files that cannot be
    read.
    """
    try:
        places = {
            name: (file, entry)
            for name, file, _, entry in decoder_tensors(checkpoint)
            if name in (EMBEDDING_WEIGHT, HEAD_WEIGHT)
        }
        return len(places) == 2 and not _are_equal(places[EMBEDDING_WEIGHT], places[HEAD_WEIGHT])
    except (CheckpointError, OSError):
        return False


def _are_equal(a: tuple[Path, TensorEntry], b: tuple[Path, TensorEntry]) -> bool:
    """Whether two tensors have the same numbers."""
    (a_file, a_entry), (b_file, b_entry) = a, b
    if (a_entry.dtype, a_entry.shape) != (b_entry.dtype, b_entry.shape):
        return False
    return _have_equal_bytes(a_file, a_entry, a_file.stat().st_mtime_ns, b_file, b_entry, b_file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # a start asks twice, of matrices that may have gigabytes
def _have_equal_bytes(
    a_file: Path, a_entry: TensorEntry, _a_time: int, b_file: Path, b_entry: TensorEntry, _b_time: int
) -> bool:
    """Compares two tensors of the same size; stops at the first chunk that differs. Times are those of changes."""
    with open_regular(a_file) as a_reader, open_regular(b_file) as b_reader:
        a_reader.seek(a_entry.start)
        b_reader.seek(b_entry.start)
        left = a_entry.stop - a_entry.start
        while left > 0:
            size = min(left, _CHUNK_BYTES)
            if a_reader.read(size) != b_reader.read(size):
                return False
            left -= size
    return True
