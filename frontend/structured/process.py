"""A worker process from outside: started, asked, ended. `worker.py` is its inside."""

import asyncio
import contextlib
import json
import signal
import struct
import sys
from dataclasses import dataclass

from frontend.structured.forms import FormError, OutputForm

LENGTH = struct.Struct("<I")
OUT_OF_MEMORY_STATUS = 97
_START_TIMEOUT_S = 60.0  # a vocabulary of 128k tokens takes one or two
_LATE_S = 1.0  # the worker ends itself; this is for one that does not get to it


class LimitExceeded(Exception):  # noqa: N818
    """A worker has ended over a form; says which limit it met."""


@dataclass(frozen=True, slots=True)
class GrammarTokenizer:
    """What the library must know of a model.

    Attributes:
        tokenizer_json: in Hugging Face's format.
    """

    tokenizer_json: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling one form may take.

    Attributes:
        timeout_s: of the clock on the wall.
        memory_bytes: beyond what the worker has in use before.
    """

    timeout_s: float
    memory_bytes: int


def first_frame(tokenizer: GrammarTokenizer, limits: CompileLimits) -> bytes:
    """What a worker is told at its start. May be ten megabytes, made in a tenth of a second: keep it for the next."""
    frame = {
        "tokenizer": tokenizer.tokenizer_json,
        "vocab_size": tokenizer.vocab_size,
        "end_token_ids": tokenizer.end_token_ids,
        "memory_bytes": limits.memory_bytes,
    }
    return json.dumps(frame, ensure_ascii=False).encode()


class CompilerProcess:
    """One worker. Make it with `start`; after a LimitExceeded it is gone."""

    def __init__(self, process: asyncio.subprocess.Process, limits: CompileLimits) -> None:
        self._process = process
        self._limits = limits

    @classmethod
    async def start(cls, hello: bytes, limits: CompileLimits) -> "CompilerProcess":
        """Starts a worker for one model.

        Args:
            hello: see `first_frame`.

        Raises:
            FormError: no grammar can be had with this tokenizer.
            OSError, EOFError, TimeoutError: there is no such process to be had.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "frontend.structured.worker"),  # -P: not a folder called frontend here
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # what a form can make the library say
        )
        worker = cls(process, limits)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer = await worker._ask(hello)
            if "error" in answer:
                raise FormError(f"this model's tokenizer cannot be used: {answer['error'][:500]}")
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def compile(self, form: OutputForm) -> str:
        """The grammar of a form.

        Raises:
            FormError: there is none.
            LimitExceeded: it takes too much; the worker has ended.
        """
        timeout_s = self._limits.timeout_s
        job = {"kind": form.kind, "text": form.text, "before": form.before, "timeout_s": timeout_s}
        try:
            async with asyncio.timeout(timeout_s + _LATE_S):
                answer = await self._ask(json.dumps(job).encode())
        except TimeoutError:
            await self.stop()
            raise LimitExceeded(self._too_slow) from None
        except (EOFError, OSError):
            await self._process.wait()
            raise LimitExceeded(self._cause_of_end()) from None
        except BaseException:
            await self.stop()
            raise
        if "error" in answer:
            raise FormError(answer["error"])
        grammar: str = answer["grammar"]
        return grammar

    @property
    def is_alive(self) -> bool:
        """Whether it may be asked for the next form."""
        return self._process.returncode is None

    async def stop(self) -> None:
        """Ends the worker, whatever it is doing; may be called again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _ask(self, data: bytes) -> dict[str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        await self._process.stdin.drain()
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        answer: dict[str, str] = json.loads(await self._process.stdout.readexactly(length))
        return answer

    @property
    def _too_slow(self) -> str:
        return f"compiling it takes more than {self._limits.timeout_s:g} s"

    def _cause_of_end(self) -> str:
        match self._process.returncode:
            case int(code) if code == -signal.SIGALRM:
                return self._too_slow
            case int(code) if code in (OUT_OF_MEMORY_STATUS, -signal.SIGABRT, -signal.SIGKILL):
                return f"compiling it takes more than {self._limits.memory_bytes >> 20} MiB of memory"
        return f"compiling it ends the compiler (status {self._process.returncode})"
