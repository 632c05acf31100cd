"""Names that have metric series of their own: the first ones that were seen, and the same ones in all workers.

Any worker is scraped, and a replacement continues the files of its predecessor. If each chose its own names, there
would be as many sets of series as workers and replacements, and a name would count partly as "other".
"""

import contextlib
import fcntl
import json
from pathlib import Path


class LabelNames:
    """Gives series of their own to the first names.

    Invariant: at most `max_names` names have them, in all workers together.

    Args:
        max_names: see above.
        file: shared by all workers, a JSON text per line; None: a single process.
    """

    def __init__(self, max_names: int, file: Path | None) -> None:
        self._max_names = max_names
        self._file = file
        self._names: set[str] = set()

    def admits(self, name: str) -> bool:
        """Returns whether a name has series of its own. Reads the file only for a new name while there is room."""
        if name not in self._names and len(self._names) < self._max_names:
            self._add(name)
        return name in self._names

    def _add(self, name: str) -> None:
        if self._file is None:
            self._names.add(name)
            return
        with contextlib.suppress(OSError), self._file.open("ab+", buffering=0) as file:  # the disk may be full
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            file.seek(0)
            complete, newline, _ = file.read().rpartition(b"\n")
            self._names.update(map(json.loads, complete.splitlines()))
            if name not in self._names and len(self._names) < self._max_names:
                file.truncate(len(complete) + len(newline))  # what a write on a full disk left of a line
                line = json.dumps(name).encode() + b"\n"
                if file.write(line) == len(line):
                    self._names.add(name)
