"""Files that are read again when they change, while the server runs: certificates and keys are replaced without
dropping a call.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from frontend.errors import ConfigError

logger = logging.getLogger(__name__)

_EVERY_S = 5.0

_Stamp = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Looks at some files every few seconds and calls back when one has changed.

    Args:
        what: name of what they hold, for the log.
        paths: the files.
        reload: reads them again; what it had stays in force if it raises ConfigError.
    """

    def __init__(self, what: str, paths: Sequence[Path], reload: Callable[[], None]) -> None:
        self._what = what
        self._paths = paths
        self._reload = reload
        self._stamp = self._look()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.create_task(self._look_for_ever())

    async def stop(self) -> None:
        """Looks no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._reload()
                    logger.info("%s: read again", self._what)
                except ConfigError as error:
                    logger.warning("%s: kept as before: %s", self._what, error)

    def _look(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
