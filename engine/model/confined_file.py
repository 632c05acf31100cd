"""Opens files at untrusted paths, only if they lie in given folders."""

import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from engine.errors import CheckpointError
from engine.model.checkpoint_file import check_regular


def find_confined(path: str, roots: Sequence[Path]) -> Path:
    """Returns a folder in one of the folders, given by an absolute path, or one relative to any of them.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the path leads out of the folders, whether or not it exists there, or cannot be read.
    """
    is_inside = False
    try:
        for root in roots:
            folder = root / path
            if folder.resolve().is_relative_to(root.resolve()):
                is_inside = True
                if folder.is_dir():
                    return folder
    except (OSError, RuntimeError, ValueError) as error:  # see `open_confined`
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if is_inside:
        raise FileNotFoundError(path)
    raise _outside(path)


def open_confined(path: Path, roots: Sequence[Path]) -> BufferedReader:
    """Opens a regular file in one of the folders; never blocks.

    Links may lead within the folders. Those on the resolved path are not followed any more, so that exchanging a folder
    for a link meanwhile leads nowhere.

    Raises:
        FileNotFoundError: the path does not exist.
        CheckpointError: it leads out of the folders, whether or not it exists there; it is not a regular file, or
            cannot be opened.
    """
    try:
        resolved = path.resolve()
        for root in roots:
            real_root = root.resolve()
            if resolved.is_relative_to(real_root) and resolved != real_root:
                return _open_below(path, real_root, resolved.relative_to(real_root).parts)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a zero byte
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    raise _outside(path)


def _outside(path: str | Path) -> CheckpointError:
    return CheckpointError(f"{path}: is not in a folder of --lora-dir")


def _open_below(path: Path, root: Path, parts: Sequence[str]) -> BufferedReader:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        # First: opening a device may have effects.
        check_regular(path, os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    file = os.fdopen(descriptor, "rb")
    try:
        check_regular(path, os.fstat(descriptor))
    except BaseException:
        file.close()
        raise
    return file
