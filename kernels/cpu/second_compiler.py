"""`python -m kernels.cpu.second_compiler`: compiles the kernels of sampling beside an engine that compiles the others.

numba compiles one kernel at a time in a process, so a second process halves the first start on two cores. It prints a
line per kernel and leaves them on the disk, where the engine finds them. It ends with the engine, which holds its input
open; if it fails, the engine compiles what is missing.
"""

import os
import subprocess
import sys
import threading

from kernels.cpu.cpu_levels import target


class SecondCompiler:
    """The engine's side of the process. At the end of its context the process has ended."""

    def __init__(self, *, is_allowed: bool) -> None:
        """Without is_allowed no process is ever started, because there is only one core."""
        self._is_allowed = is_allowed
        self._process: subprocess.Popen[bytes] | None = None
        self._num_compiled = 0

    def __enter__(self) -> "SecondCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()

    def start(self) -> None:
        """Starts the process at the first call; call it once a kernel has been compiled."""
        if not self._is_allowed:
            return
        self._is_allowed = False
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, **target().variables(), "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the engine gives the same warnings
            start_new_session=True,  # a terminal's Ctrl-C is the engine's
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def num_compiled(self) -> int:
        """Returns how many kernels the process has compiled."""
        if self._process is not None and self._process.stdout is not None:
            self._num_compiled += (self._process.stdout.read() or b"").count(b"\n")
        return self._num_compiled

    def wait(self) -> None:
        """Waits until the process has compiled all of its kernels, if it was started; it is not started any more."""
        self._is_allowed = False
        if self._process is not None:
            self._process.wait()


def _end_with_engine() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _main() -> None:
    threading.Thread(target=_end_with_engine, daemon=True).start()
    import kernels.cpu.threads  # noqa: F401 - selects the layer of numba's threads
    from kernels.cpu.jit import watch_compiles
    from kernels.cpu.sample import compile_sampler

    with watch_compiles(lambda _done, _total: print("compiled", flush=True)):  # noqa: T201 - read by the engine
        compile_sampler()


if __name__ == "__main__":
    _main()
