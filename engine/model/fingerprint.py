"""A cheap identity of weights: enough to tell two fine-tunes of one model apart, without reading gigabytes."""

import hashlib
from pathlib import Path

SLICE_BYTES = 4096
SLICES_PER_FILE = 64


def weights_fingerprint(model_dir: Path) -> str:
    """32 hex digits over config.json and, of each safetensors file, its name, its size and 64 slices of 4 KiB spread
    over it.

    Training moves nearly every weight, so slices tell; a file with one altered byte between them has the same
    fingerprint.
    """
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(path.name.encode() + b"\0" + size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for index in range(SLICES_PER_FILE):
                file.seek(index * max(0, size - SLICE_BYTES) // (SLICES_PER_FILE - 1))
                digest.update(file.read(SLICE_BYTES))
    return digest.hexdigest()[:32]
