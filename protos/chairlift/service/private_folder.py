"""Folders of running processes in the temporary directory, and the removal of those whose processes were killed.

A process that is killed cannot remove its folder. Each folder therefore has a file that its processes lock (flock): the
kernel releases locks however a process ends, and sees those of processes in other PID namespaces that share the
directory. Folders without a lock file, of other users, and symbolic links are left alone.
"""

import contextlib
import fcntl
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "chairlift-"
LOCK_NAME = "owner.lock"

_log = logging.getLogger(__name__)


class PrivateFolder:
    """A folder that only this user can enter. Creating one first removes folders that a killed process left behind.

    Invariant: from its appearance under its final name to `remove`, the lock file is locked.

    Args:
        kind: second part of the folder's name, behind `PREFIX`.
        root: parent folder; None: the temporary directory.

    Attributes:
        path: the folder.
    """

    def __init__(self, kind: str, root: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}", dir=root))  # mode 0700
        remove_abandoned(self.path.parent)
        self._lock: io.FileIO | None = None
        with contextlib.suppress(OSError):  # without locks, such as on some network file systems, it is left alone
            self._lock = _create_lock(self.path)

    def remove(self) -> None:
        """Removes the folder. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def hold_folder(path: Path) -> None:
    """Keeps a folder until this process ends, even if its owner ends before; a folder without a lock file is ignored.

    Args:
        path: a `PrivateFolder` of another process.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW), fcntl.LOCK_SH)  # never closed


def remove_abandoned(root: Path) -> None:
    """Removes the folders of this user below `root` whose lock nobody holds."""
    removed = [path.name for path in _candidates(root) if _remove_if_abandoned(path)]
    if removed:
        _log.debug("removed %d folder(s) that killed processes left in %s: %s", len(removed), root, ", ".join(removed))


def _create_lock(folder: Path) -> io.FileIO:
    """Creates the lock file, locked before it gets its name: others never see it unlocked."""
    new = folder / f"{LOCK_NAME}.new"
    lock = io.FileIO(new, "x+")
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        new.rename(folder / LOCK_NAME)
    except OSError:
        lock.close()
        new.unlink(missing_ok=True)
        raise
    return lock


def _candidates(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [root / entry.name for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:  # the directory may be entered and written, but not listed
        return []


def _remove_if_abandoned(path: Path) -> bool:
    """Removes one folder if it is this user's and no process holds its lock; returns whether it did."""
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, folder)
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                return False
            lock = os.open(LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:  # another process has just removed it
                return False
        except OSError:  # no folder, no lock file, or a lock that is held
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
