"""The single launch function of all kernels, so that start-up can compile all of them without running any.

The set of specializations is closed: it follows from the model, the target and the flags. At start the operations are
called once for each of them inside `compile_only`. A later compile is a defect and is counted.
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
        grid: programs in up to three dimensions; an empty grid is skipped.
        args: tensors and numbers, in the order of the kernel's parameters.
        options: its constexpr parameters, num_warps and num_stages.
    """
    requested = _requested.get()
    if requested is not None:
        requested.append(kernel.warmup(*args, grid=grid, **options))
    elif all(grid):
        kernel[grid](*args, **options)


def is_compile_only() -> bool:
    """Tells whether `launch` only compiles; callers should then launch every specialization of later calls."""
    return _requested.get() is not None


@contextmanager
def compile_only(*, num_threads: int | None = None, progress: Progress = no_progress) -> Iterator[list[Any]]:
    """Makes `launch` compile instead of run; all compiles have finished when the block ends.

    Args:
        num_threads: compile threads; None is one per core.
        progress: shows the kernels compiled, out of those not cached.
    Yields: Triton's compiled kernels, one per launch, in order; valid once the block has ended.

    Raises:
        NoRoomError: a compile's files cannot be written.
        ExceptionGroup: kernels that do not compile, each with Triton's error.
    """
    requested: list[Any] = []
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="compile") as executor:
        # Errors are collected here: Triton's mode would stay on if it raised the first of them at its end.
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
    """Loads compiled kernels onto the GPU, instead of at their first launch.

    Otherwise a request would wait for the load, and a kernel that needs too many resources would fail only then.

    Raises: triton.runtime.errors.OutOfResources: of the GPU's registers or shared memory.
    """
    for kernel in kernels:
        if kernel is not None:  # of the interpreter
            _ = kernel.run


class CompileCounter:
    """Counts kernel compiles in this process from now on, except those inside `compile_only`.

    Attributes:
        num_compiles: compiles so far.
    """

    def __init__(self, on_compile: Callable[[str], None] = lambda _: None) -> None:
        """Calls on_compile(kernel name, arguments) in the launching thread."""
        self.num_compiles = 0
        self._on_compile = on_compile
        self._lock = threading.Lock()
        triton.knobs.runtime.jit_post_compile_hook = self._hook

    def close(self) -> None:
        """Stops counting."""
        triton.knobs.runtime.jit_post_compile_hook = None

    def _hook(self, *, repr: str, is_manual_warmup: bool, **_: Any) -> None:  # noqa: A002 - Triton's name for it
        if not is_manual_warmup:
            with self._lock:
                self.num_compiles += 1
            self._on_compile(repr)
