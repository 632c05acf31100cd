"""Reloads files when they change: certificates and keys are replaced without dropping a call."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from frontend.errors import ConfigError

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Checks some files every 5 s and calls `reload` when one has changed.

    A failed reload is tried again at every check: the end of its cause, such as a mode that denied access or a lack of
    file descriptors, leaves no trace in what is compared.

    Args:
        what: name of their content, for the log.
        paths: the files.
        reload: reloads them; if it raises ConfigError, the old content stays in use.
    """

    def __init__(self, what: str, paths: Sequence[Path], reload: Callable[[], None]) -> None:
        self._what = what
        self._paths = paths
        self._reload = reload
        self._stamp = self._read_stamp()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the checks."""
        self._task = asyncio.create_task(self._check_repeatedly())

    async def stop(self) -> None:
        """Stops the checks."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _check_repeatedly(self) -> None:
        problem = ""  # of the last reload
        while True:
            await asyncio.sleep(_INTERVAL_S)
            stamp = self._read_stamp()
            has_changed = stamp != self._stamp
            if not (has_changed or problem):
                continue
            self._stamp = stamp
            try:
                self._reload()
                problem = ""
                logger.info("%s reloaded", self._what)
            except ConfigError as error:
                if has_changed or str(error) != problem:
                    logger.warning("%s not reloaded, the old content stays in use: %s", self._what, error)
                problem = str(error)

    def _read_stamp(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
