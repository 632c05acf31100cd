"""Numbers of engines in metrics: from 0 as in vLLM, each the lowest free one, and the same one in all workers.

Any worker is scraped. If one knew as engine 0 what is engine 1 to another, counters would jump back and forth.
"""

import fcntl
import os
from itertools import count
from pathlib import Path

_MAX_ADDRESS_BYTES = 4096


class EngineLabels:
    """Gives out numbers.

    Args:
        folder: shared by all workers. A number is taken while a worker holds a lock on its file, which has the engine's
            address; the lock ends with the worker. None: a single process.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[str, int | None] = {}  # descriptors of files by number; None in a single process

    def take(self, address: str) -> str:
        """Returns the number that another worker has for an engine, else the lowest free one."""
        if self._folder is None:
            label = next(label for label in map(str, count()) if label not in self._held)
            self._held[label] = None
            return label
        with (self._folder / "engines.lock").open("w") as guard:  # one worker at a time
            fcntl.flock(guard, fcntl.LOCK_EX)
            return self._take_shared(self._folder, address.encode())

    def free(self, label: str) -> None:
        """Returns a number; other workers may still have the engine."""
        file = self._held.pop(label)
        if file is not None:
            os.close(file)

    def _take_shared(self, folder: Path, address: bytes) -> str:
        numbers = range(len(list(folder.glob("engine-*"))) + 1)  # one more than there are
        files = {
            label: os.open(folder / f"engine-{label}", os.O_RDWR | os.O_CREAT, 0o600)
            for label in map(str, numbers)
            if label not in self._held
        }
        try:
            others = [label for label, file in files.items() if _is_held(file)]
            found = [label for label in others if os.pread(files[label], _MAX_ADDRESS_BYTES, 0) == address]
            label = found[0] if found else next(label for label in files if label not in others)
            if not found:
                os.ftruncate(files[label], 0)
                os.pwrite(files[label], address, 0)
            fcntl.flock(files[label], fcntl.LOCK_SH)
            self._held[label] = files.pop(label)
        finally:
            for file in files.values():
                os.close(file)
        return label


def _is_held(file: int) -> bool:
    """Returns whether another worker has the number of this file; otherwise locks the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
