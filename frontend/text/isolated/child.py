"""A child process with pipes to its standard input and output, for every event loop.

`subprocess.Popen` starts it, because it avoids a fork where possible. Children that uvloop forked from a process with
gRPC's threads sometimes ended by SIGSEGV before their program ran.
"""

import asyncio
import subprocess
from asyncio.streams import FlowControlMixin
from collections.abc import Sequence


class ChildProcess:
    """One child process. Create it with `start`, and always `wait` for its end, which closes the pipes.

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
        """Starts a command and discards its standard error.

        Raises:
            OSError: the process or its pipes cannot be created.
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
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process, unless it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Waits until the process has ended; returns its exit status."""
        try:
            status = await asyncio.to_thread(self._process.wait)
        finally:
            self.stdin.close()
            self._stdout_transport.close()
        await asyncio.sleep(0)  # the pipes are closed in the next iteration of the event loop
        return status
