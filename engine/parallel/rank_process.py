"""A rank in a process of its own, from the side of the process that started it.

Each of the two detects the end of the other, however it ends. The rank's standard input is a pipe that only its starter
holds open. The channel between them is open at its far end only in the rank. `engine.startup.follower` is the rank's
side, and describes the messages.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Pipe

from engine.errors import ConfigError, EngineError
from engine.parallel.peer import News

# -P keeps the current directory, which may hold a folder named engine, off the module path.
FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "engine.startup.follower")

_END_TIMEOUT_S = 5.0  # for a process whose channel is closed

_log = logging.getLogger(__name__)


class RankProcess:
    """Implements `Peer`.

    Attributes:
        name: rank and process id.
        pid: process id.
    """

    def __init__(self, rank: int, command: Sequence[str]) -> None:
        """Starts the process.

        Args:
            rank: for its name.
            command: program; the file descriptor of its channel is appended.
        Raises: ConfigError: the process cannot be started.
        """
        self._channel, far_end = Pipe()
        try:
            self._process = subprocess.Popen(
                [*command, str(far_end.fileno())], stdin=subprocess.PIPE, pass_fds=[far_end.fileno()]
            )
        except OSError as error:
            self._channel.close()
            raise ConfigError(f"the process of rank {rank} cannot be started: {error}") from error
        finally:
            far_end.close()
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        self.pid = self._process.pid
        self.name = f"rank {rank} (process {self.pid})"
        _log.info("Started %s", self.name)

    def fileno(self) -> int:
        """The channel's file descriptor."""
        return self._channel.fileno()

    def assign(self, assignment: object) -> None:
        """Sends the first message, which says what to load. Raises: OSError: it is gone."""
        self._channel.send(assignment)

    def send_bytes(self, message: bytes) -> None:
        """See `Peer`."""
        self._channel.send_bytes(message)

    def receive(self) -> News | EngineError:
        """See `Peer`; the rank sends None when it has loaded, and an error before it ends."""
        error: EngineError | None = self._channel.recv()
        return News.READY if error is None else error

    def describe_end(self) -> str:
        """See `Peer`."""
        return _describe(self.wait(_END_TIMEOUT_S))  # only the rank holds the other end: it is ending

    def ask_to_leave(self, *, is_ready: bool) -> None:
        """See `Peer`. Before all are ready, a rank may be loading or connecting, and exits immediately."""
        if not is_ready:
            self._stdin.close()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._channel.fileno())) as end:
            end.shutdown(socket.SHUT_WR)  # it reads all plans that were sent, and then the end

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status when it has ended; kills it after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Kills it: if it is suspended, it does not notice the end of its starter."""
        self._process.kill()

    def close(self) -> None:
        """Closes channel and standard input; if it still runs, it exits."""
        self._channel.close()
        self._stdin.close()


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no name
        return f"was killed by signal {-status}"
