"""`python -m kernels.cpu.compilers PART ...`: compiles parts of the CPU kernels for a process that only loads them.

The kernels of the first start are compiled in processes of their own, which leave them on the disk. So every start
runs the same machine code, and answers keep their bits from one start and one engine to the next. A process that
compiles runs other code: the functions that a kernel calls are weak symbols, and the linker takes them from wherever
they were compiled first, for themselves, with sums in another order. Besides, numba compiles one kernel at a time in a
process: two processes halve the first start on two cores.

A process prints a line per kernel, and ends with the one that started it, which holds its input open. If it fails, the
kernels are compiled where they are needed.
"""

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from kernels.cpu.cpu_levels import target
from kernels.cpu.kernel_cache import compiling_missing

PARTS = ("products", "attention", "steps", "sampling")
"""What is compiled: linear layers, attention, the other operations of steps with the loop that runs them, and the
sampler. The first two take about as long as the others.
"""

OnCompiled = Callable[[int], None]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def compiling_elsewhere(num_processes: int, on_compiled: OnCompiled) -> Iterator[None]:
    """Within the context, the first kernel that is not on the disk has all of them compiled in other processes.

    Args:
        num_processes: how many at most.
        on_compiled: called with the number of kernels compiled so far, on this thread.
    """
    parts = [PARTS] if num_processes == 1 else [PARTS[:2], PARTS[2:]]

    def compile_all() -> None:
        try:
            compile_parts(parts, on_compiled)
        except OSError as error:
            _log.warning("no process to compile CPU kernels can be started: %s; compiling here", error)

    with compiling_missing(compile_all):
        yield


def compile_parts(parts: Sequence[Sequence[str]], on_compiled: OnCompiled) -> None:
    """Compiles parts, each sequence in a process; returns when all have ended. An exception ends them.

    Args:
        parts: of `PARTS`.
        on_compiled: see `compiling_elsewhere`.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string
    environment = {**os.environ, **target().variables(), "PYTHONPATH": path}
    num_compiled = 0
    with contextlib.ExitStack() as running, selectors.DefaultSelector() as outputs:
        for names in parts:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", __spec__.name, *names],  # -P: nothing from the current directory
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # this process gives the same warnings
                    start_new_session=True,  # a terminal's Ctrl-C is the engine's
                )
            )
            running.callback(process.kill)
            assert process.stdout is not None
            outputs.register(process.stdout, selectors.EVENT_READ, process)
        while outputs.get_map():
            for key, _ in outputs.select():
                lines = os.read(key.fd, 4096)
                if not lines:
                    outputs.unregister(key.fileobj)
                    if status := key.data.wait():
                        _log.warning("a process that compiles CPU kernels ended with status %d: compiling here", status)
                    continue
                num_compiled += lines.count(b"\n")
                on_compiled(num_compiled)


def _end_with_starter() -> None:
    while os.read(0, 4096):  # not sys.stdin: a thread that holds its lock at exit aborts the interpreter
        pass
    os._exit(1)


def _main(names: Sequence[str]) -> None:
    threading.Thread(target=_end_with_starter, daemon=True).start()
    import kernels.cpu.threads  # noqa: F401 - selects the layer of numba's threads
    from kernels.cpu.execute import compile_items
    from kernels.cpu.instruction import Opcode
    from kernels.cpu.jit import watch_compiles
    from kernels.cpu.sample import compile_sampler
    from kernels.cpu.worker_pool import compile_loop

    products, attention = (Opcode.PACK_ROWS, Opcode.LINEAR), (Opcode.PLAN_ATTENTION, Opcode.PAGED_ATTENTION)

    def compile_steps() -> None:
        compile_items(opcode for opcode in Opcode if opcode not in (*products, *attention))
        compile_loop()

    compile_part = {
        "products": lambda: compile_items(products),
        "attention": lambda: compile_items(attention),
        "steps": compile_steps,
        "sampling": compile_sampler,
    }
    with watch_compiles(lambda _done, _total: print("compiled", flush=True)):  # noqa: T201 - read by the starter
        for name in names:
            compile_part[name]()


if __name__ == "__main__":
    _main(sys.argv[1:])
