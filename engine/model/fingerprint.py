"""What tells weights apart without reading gigabytes: those of two models, or of a model before and after a change."""

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


def weights_identity(path: Path) -> str:
    """Returns a text that differs after any change of the weights: their fingerprint, and what files say of themselves.

    Every write to a file sets its time of change (ctime), which no program can set back. Another file in its place has
    another inode, or a later time of change. So a change that keeps name, size, modification time and all slices of the
    fingerprint is noticed, within the granularity of the clock of the file system (4 ms). A copy, or a file whose
    permissions were changed, counts as changed: it costs one start. The device is left out, because its number may
    differ after a reboot.
    """
    files = [file.stat() for file in open_checkpoint(path).weights_files()]
    times = [(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in files]
    return f"{weights_fingerprint(path)} {times}"
