"""The one way kernels are launched, so that a start-up can compile all of them without running any.

The set of specialisations is closed: it follows from the model, the target and the flags. At start the operations are
called once for every one of them inside `compile_only`; a compile that happens after that is a defect, and counted.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

from kernels.gpu.kernel_cache import NoRoomError
from kernels.gpu.progress import Progress, no_progress

_requested: ContextVar[list[Any] | None] = ContextVar("kernels_to_compile", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a Triton kernel, or only compiles it inside `compile_only`.

    Args:
        kernel: decorated with `triton.jit`.
        grid: programs in up to three dimensions; a launch of none is skipped.
        args: tensors and numbers, in the order of the kernel's parameters.
        options: its constexpr parameters, num_warps and num_stages.
    """
    requested = _requested.get()
    if requested is not None:
        requested.append(kernel.warmup(*args, grid=grid, **options))
    elif all(grid):
        kernel[grid](*args, **options)


def is_compile_only() -> bool:
    """Whether `launch` only compiles: what is called then should launch each form that other calls may take."""
    return _requested.get() is not None


@contextmanager
def compile_only(*, num_threads: int | None = None, progress: Progress = no_progress) -> Iterator[list[Any]]:
    """Within it, `launch` compiles and does not run; what has been asked for is compiled when it ends.

    Args:
        num_threads: that compile at once; None is one per core.
        progress: shows how many kernels are compiled, of those that were not yet.
    Yields: Triton's compiled kernels, one for each launch, in order; each may be looked at once the block has ended.

    Raises:
        NoRoomError: a compile's files cannot be written.
        ExceptionGroup: kernels that do not compile, each with Triton's error.
    """
    requested: list[Any] = []
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="compile") as executor:
        # Errors are collected here: if Triton's mode raises the first of them when it ends, it stays switched on.
        mode = triton.AsyncCompileMode(executor, ignore_errors=True)
        token = _requested.set(requested)
        try:
            with mode:
                yield requested
                if futures := mode.raw_futures:
                    for _ in progress(as_completed(futures), desc="compiling kernels", total=len(futures)):
                        pass
        finally:
            _requested.reset(token)
    errors = [error for future in mode.raw_futures if isinstance(error := future.exception(), Exception)]
    if (disk := next((error for error in errors if isinstance(error, OSError)), None)) is not None:
        raise NoRoomError(disk) from disk
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {len(requested)} kernels do not compile", errors)
    for index, kernel in enumerate(requested):
        if isinstance(kernel, triton.FutureKernel):
            requested[index] = kernel.result()


def load_kernels(kernels: Iterable[Any]) -> None:
    """Brings compiled kernels onto the GPU. Else their first launch does: a request would wait for it, and a kernel
    that needs more than the GPU has would be found out only there.

    Raises: triton.runtime.errors.OutOfResources: of the GPU's registers or shared memory.
    """
    for kernel in kernels:
        if kernel is not None:  # of the interpreter
            _ = kernel.run


class CompileCounter:
    """Counts compiles of kernels in this process from now on, those inside `compile_only` excepted.

    Attributes:
        num_compiles: so far.
    """

    def __init__(self, on_compile: Callable[[str], None] = lambda _: None) -> None:
        """on_compile is told the kernel's name and its arguments, in the thread that launched it."""
        self.num_compiles = 0
        self._on_compile = on_compile
        self._lock = threading.Lock()
        triton.knobs.runtime.jit_post_compile_hook = self._hook

    def close(self) -> None:
        """Counts no more."""
        triton.knobs.runtime.jit_post_compile_hook = None

    def _hook(self, *, repr: str, is_manual_warmup: bool, **_: Any) -> None:  # noqa: A002 - Triton's name for it
        if not is_manual_warmup:
            with self._lock:
                self.num_compiles += 1
            self._on_compile(repr)
