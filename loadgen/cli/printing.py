"""Makes output survive a closed reader, as in `chairlift-loadgen run ... | head -3` or a closed terminal: the run
continues and writes its files.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_READER_IS_GONE = (errno.EPIPE, errno.EIO)  # of a pipe, and of a terminal


class _Outlasting:
    """A text stream that discards its output once the reader has closed it.

    Characters that its encoding lacks are escaped: file names and server errors may contain any, even half of one.
    """

    def __init__(self, stream: TextIO, *, is_needed: bool) -> None:
        self._stream, self._is_needed = stream, is_needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Discards what is buffered, now and when the interpreter exits."""
        if self._is_needed and error.errno not in _READER_IS_GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """Inside it a closed stdout or stderr is no error, nor is a full disk under stderr, which has progress only."""
    before = sys.stdout, sys.stderr
    outlasting = _Outlasting(sys.stdout, is_needed=True), _Outlasting(sys.stderr, is_needed=False)
    sys.stdout, sys.stderr = (cast("TextIO", stream) for stream in outlasting)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
