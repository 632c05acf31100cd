"""A child process with pipes to its standard input and output, started the same way under every event loop.

Started by `subprocess.Popen`, which does not fork where it can avoid it: a child that uvloop had forked from a process
with gRPC's threads was seen to end by SIGSEGV before its program ran.
"""

import asyncio
import subprocess
from asyncio.streams import FlowControlMixin
from collections.abc import Sequence


class ChildProcess:
    """One child. Make it with `start`; `wait` for its end in any case, which closes the pipes.

    Attributes:
        stdin, stdout: the pipes.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stdout_transport: asyncio.ReadTransport,
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self._stdout_transport = stdout_transport

    @classmethod
    async def start(cls, command: Sequence[str]) -> "ChildProcess":
        """Starts a command, whose standard error is discarded.

        Raises:
            OSError: the process or its pipes cannot be had.
        """
        loop = asyncio.get_running_loop()
        process = subprocess.Popen(  # noqa: ASYNC220 - a millisecond, as in asyncio's own
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        stdout, reading = asyncio.StreamReader(), None
        try:
            reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
            writing, protocol = await loop.connect_write_pipe(FlowControlMixin, process.stdin)
        except BaseException:
            if reading is not None:
                reading.close()
            process.kill()
            process.communicate()
            raise
        return cls(process, asyncio.StreamWriter(writing, protocol, None, loop), stdout, reading)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, minus the signal that ended it; None: it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Waits for its end; returns the exit status."""
        try:
            status = await asyncio.to_thread(self._process.wait)
        finally:
            self.stdin.close()
            self._stdout_transport.close()
        await asyncio.sleep(0)  # the pipes are closed in the next turn of the loop, which may be its last
        return status
