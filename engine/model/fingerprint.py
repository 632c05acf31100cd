"""A fingerprint of weights, which distinguishes fine-tunes of one model without reading gigabytes."""

import hashlib
from pathlib import Path

from engine.model.checkpoint import open_checkpoint

SLICE_BYTES = 4096
SLICES_PER_FILE = 64


def weights_fingerprint(path: Path) -> str:
    """Returns 32 hex digits: a hash of config.json, and of name, size and 64 slices of 4 KiB of each file with weights.

    Training changes nearly every weight, so the slices differ. A change of single bytes between them is not detected.
    """
    checkpoint = open_checkpoint(path)
    digest = hashlib.sha256(checkpoint.description())
    for file in checkpoint.weights_files():
        size = file.stat().st_size
        digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with file.open("rb") as reader:
            for index in range(SLICES_PER_FILE):
                reader.seek(index * max(0, size - SLICE_BYTES) // (SLICES_PER_FILE - 1))
                digest.update(reader.read(SLICE_BYTES))
    return digest.hexdigest()[:32]
