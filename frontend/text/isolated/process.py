"""An isolated process as its parent sees it; `worker.py` runs inside it."""

import asyncio
import json
import signal
import sys
from dataclasses import asdict, dataclass
from typing import Any

from frontend.text.isolated.child import ChildProcess
from frontend.text.isolated.worker import LENGTH, OUT_OF_MEMORY_STATUS, TIMER_SIGNALS, Clock, Frame, encode

_START_TIMEOUT_S = 60.0  # preparing a vocabulary of 128k tokens takes one or two
_LATE_S = 1.0  # grace for a process that should end itself
_WALL_PER_CPU = 20.0  # on a machine with 20 runnable processes per CPU
_MAX_ANSWER_BYTES = 64 << 20


class StartRefused(Exception):  # noqa: N818
    """The process cannot run this kind of job; the message says why."""


class LimitExceeded(Exception):  # noqa: N818
    """A job ended its process; the message names the exceeded limit, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of one job.

    Attributes:
        timeout_s: time limit, measured by `clock`.
        memory_bytes: memory limit in addition to the memory in use before the job.
        clock: wall-clock time, or CPU time of the process.
        start_timeout_s: time limit of the start, to which the memory limit then applies, too; None: no limits.
    """

    timeout_s: float
    memory_bytes: int
    clock: Clock = Clock.WALL
    start_timeout_s: float | None = None

    def wall_s(self, timeout_s: float) -> float:
        """Wall-clock seconds after which a process that has not ended itself is killed."""
        return timeout_s * (_WALL_PER_CPU if self.clock is Clock.CPU else 1.0) + _LATE_S


def _seconds(timeout_s: float, clock: Clock) -> str:
    return f"{timeout_s:g} s" + (" of CPU time" if clock is Clock.CPU else "")


def first_frame(limits: JobLimits, values: Frame) -> bytes:
    """Returns a process's first frame. It may have 10 MB and take 0.1 s, so reuse it for the next process.

    Args:
        limits: limits of each job.
        values: settings for the kind of job.
    """
    return encode({"limits": asdict(limits), **values})


class IsolatedProcess:
    """One process. Create it with `start`; after a LimitExceeded it has ended."""

    def __init__(self, process: ChildProcess, limits: JobLimits) -> None:
        self._process = process
        self._limits = limits

    @classmethod
    async def start(cls, module: str, hello: bytes, limits: JobLimits) -> "IsolatedProcess":
        """Starts a process.

        Args:
            module: module that calls `worker.serve`.
            hello: see `first_frame`.
            limits: the limits in `hello`.

        Raises:
            StartRefused: the process rejects the first frame, or ends itself at a limit.
            OSError, EOFError, TimeoutError: the process cannot be started now; something else may have ended it.
        """
        # -P: ignore a folder with the package's name in the current directory.
        process = await ChildProcess.start([sys.executable, "-P", "-m", module])
        worker = cls(process, limits)
        timeout_s = limits.start_timeout_s
        try:
            if timeout_s is None:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    answer = await worker._exchange(hello)
            else:
                answer = await worker._ask(hello, timeout_s)
        except LimitExceeded as error:
            if worker._has_ended_itself:
                raise StartRefused(str(error)) from error
            raise EOFError(f"it ended with status {process.returncode} while it started") from error
        except BaseException:
            await worker.stop()
            raise
        if "error" in answer:
            await worker.stop()
            raise StartRefused(answer["error"])
        return worker

    async def ask(self, job: bytes) -> Frame:
        """Returns the answer to a job.

        Raises:
            LimitExceeded: the job exceeded a limit; the process has ended.
        """
        return await self._ask(job, self._limits.timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the process can run another job."""
        return self._process.returncode is None

    async def stop(self) -> None:
        """Kills the process; may be called again."""
        self._process.kill()
        await self._process.wait()

    async def _ask(self, data: bytes, timeout_s: float) -> Frame:
        try:
            async with asyncio.timeout(self._limits.wall_s(timeout_s)):
                return await self._exchange(data)
        except TimeoutError:
            await self.stop()
            raise LimitExceeded(self._too_slow(timeout_s)) from None
        except (EOFError, OSError):
            await self._process.wait()
            raise LimitExceeded(self._cause_of_end(timeout_s)) from None
        except BaseException:
            await self.stop()
            raise

    async def _exchange(self, data: bytes) -> Frame:
        if self._process.stdin.is_closing():
            raise EOFError
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        await self._process.stdin.drain()
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if length > _MAX_ANSWER_BYTES:
            await self.stop()
            raise EOFError
        answer: dict[str, Any] = json.loads(await self._process.stdout.readexactly(length))
        return answer

    @property
    def _has_ended_itself(self) -> bool:
        """Whether a limit that it set itself was exceeded. Anyone may kill it, such as the kernel for memory."""
        code = self._process.returncode
        return code is not None and (code == OUT_OF_MEMORY_STATUS or -code in TIMER_SIGNALS)

    def _too_slow(self, timeout_s: float) -> str:
        return f"takes more than {_seconds(timeout_s, self._limits.clock)}"

    def _cause_of_end(self, timeout_s: float) -> str:
        match self._process.returncode:
            case int(code) if -code in TIMER_SIGNALS:
                return self._too_slow(timeout_s)
            case int(code) if code in (OUT_OF_MEMORY_STATUS, -signal.SIGABRT, -signal.SIGKILL):
                return f"takes more than {self._limits.memory_bytes >> 20} MiB of memory"
        return f"ends its process (status {self._process.returncode})"
