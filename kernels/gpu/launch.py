"""The single way to launch a kernel, so that start-up can compile all of them without running any.

The set of specializations is closed: it follows from the model, the target and the flags. At start the operations are
called once for each of them inside `compile_only`. A later compile is a defect and is counted.
"""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from kernels.gpu.kernel_cache import NoRoomError
from kernels.gpu.progress import Progress, no_progress
from kernels.gpu.targets import UnsupportedTargetError

_INT32_END = 2**31
_MISSING_DIMENSIONS = ((1, 1, 1), (1, 1), (1,), ())
_ENTER_HOOKS = triton.knobs.runtime.launch_enter_hook
_EXIT_HOOKS = triton.knobs.runtime.launch_exit_hook
_INSTEAD = "Use --kernels torch, which is slower but needs no kernels, or --device cpu"
_requested: ContextVar[tuple[list[Any], list[str]] | None] = ContextVar("kernels_to_compile", default=None)
"""Kernels to compile and their names, one per launch."""


class BoundKernel:
    """A Triton kernel with its constexpr parameters. Launches of a known specialization skip Triton's dispatch.

    Triton's dispatch derives the specialization from every argument and looks the compiled kernel up by a string, which
    takes several times as long as the launch itself. Here the lookup key is made of everything that Triton specialises
    on: the device, dtypes, the alignment of pointers, and of integers the value 1 and divisibility by 16. Arguments
    with equal keys therefore use the same compiled kernel. A new key goes through Triton, which compiles if necessary.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        """Compiles nothing.

        Args:
            kernel: decorated with `triton.jit`; takes tensors, then numbers, then constexpr parameters.
            options: its constexpr parameters, num_warps and num_stages.
        """
        self._kernel = kernel
        self._options = options
        self._is_interpreted = not isinstance(kernel, triton.JITFunction)
        self._compiled: dict[tuple[object, ...], tuple[Callable[..., None], object, object]] = {}
        self._num_tensors = 0
        self._number_types: tuple[type, ...] | None = None  # known from the first launch
        self._specialized_numbers: tuple[int, ...] = ()
        if self._is_interpreted:
            return
        constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
        assert kernel.arg_names[-len(constants) :] == constants, f"{kernel}: constexpr parameters are not the last ones"
        self._constants = [options[name] for name in constants]

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launches the kernel, or only compiles it inside `compile_only`.

        Args:
            grid: programs in up to three dimensions; an empty grid is skipped.
            args: tensors, then numbers, in the order of the kernel's parameters.
        """
        requested = _requested.get()
        if requested is not None:
            kernels, names = requested
            kernels.append(self._kernel.warmup(*args, grid=grid, **self._options))
            names.append(self._kernel.__name__)
            return
        if 0 in grid:
            return
        if self._is_interpreted or _ENTER_HOOKS.calls or _EXIT_HOOKS.calls:  # hooks of a profiler
            self.dispatch(grid, *args)
            return
        if self._number_types is None:
            self._learn_types(args)
        tensors, numbers = args[: self._num_tensors], args[self._num_tensors :]
        if tuple(map(type, numbers)) != self._number_types or (numbers and max(numbers) >= _INT32_END):
            self.dispatch(grid, *args)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        active = driver.active
        device = active.get_current_device()
        key = (
            device,
            reduce(or_, pointers, 0) & 15 and tuple([pointer & 15 for pointer in pointers]),
            self._specialized_numbers
            and tuple([16 if numbers[i] == 1 else numbers[i] & 15 for i in self._specialized_numbers]),
            *[tensor.dtype for tensor in tensors],
        )
        known = self._compiled.get(key)
        if known is None:
            kernel = self.dispatch(grid, *args)
            if kernel.metadata.target.backend == "cuda":  # ROCm specialises on the sizes of tensors too
                self._compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
            return
        run, function, metadata = known
        run(
            *grid,
            *_MISSING_DIMENSIONS[len(grid)],
            active.get_current_stream(device),
            function,
            metadata,
            None,  # metadata for hooks, and the hooks
            None,
            None,
            *pointers,
            *numbers,
            *self._constants,
        )

    def dispatch(self, grid: tuple[int, ...], *args: Any) -> Any:
        """Launches the kernel through Triton's dispatch and returns the compiled kernel."""
        return self._kernel[grid](*args, **self._options)

    def _learn_types(self, args: tuple[Any, ...]) -> None:
        self._num_tensors = sum(isinstance(arg, torch.Tensor) for arg in args)
        numbers = args[self._num_tensors :]
        parameters = self._kernel.params[self._num_tensors :]
        self._number_types = tuple(map(type, numbers))
        self._specialized_numbers = tuple(
            index
            for index, (number, parameter) in enumerate(zip(numbers, parameters, strict=False))
            if isinstance(number, int) and not parameter.do_not_specialize
        )


@cache
def _bind(kernel: Any, **options: Any) -> BoundKernel:
    return BoundKernel(kernel, **options)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a kernel with these constexpr parameters; see `BoundKernel`, which callers of each layer keep."""
    _bind(kernel, **options)(grid, *args)


def is_compile_only() -> bool:
    """Tells whether launches only compile; callers should then launch every specialization of later calls."""
    return _requested.get() is not None


@contextmanager
def compile_only(*, num_threads: int | None = None, progress: Progress = no_progress) -> Iterator[list[Any]]:
    """Makes launches compile instead of run; all compiles have finished when the block ends.

    Args:
        num_threads: compile threads; None is one per core.
        progress: shows the kernels compiled, out of those not cached.
    Yields: Triton's compiled kernels, one per launch, in order; valid once the block has ended.

    Raises:
        NoRoomError: a compile's files cannot be written.
        UnsupportedTargetError: kernels do not compile: how many, and the first one; its cause has each error.
    """
    requested: list[Any] = []
    names: list[str] = []
    with ThreadPoolExecutor(num_threads or os.cpu_count() or 1, thread_name_prefix="compile") as executor:
        # Errors are collected here: Triton's mode would stay on if it raised the first of them at its end.
        mode = triton.AsyncCompileMode(executor, ignore_errors=True)
        token = _requested.set((requested, names))
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
        futures = (kernel.future if isinstance(kernel, triton.FutureKernel) else None for kernel in requested)
        first = next(name for name, future in zip(names, futures, strict=True) if future and future.exception())
        raise UnsupportedTargetError(
            f"{len(errors)} of {len(requested)} GPU kernels do not compile with Triton {triton.__version__}, such as "
            f"{first}: {_reason(errors[0])}. {_INSTEAD}"
        ) from ExceptionGroup("kernels do not compile", errors)
    for index, kernel in enumerate(requested):
        if isinstance(kernel, triton.FutureKernel):
            requested[index] = kernel.result()


def load_kernels(kernels: Iterable[Any]) -> None:
    """Loads compiled kernels onto the GPU, instead of at their first launch.

    Otherwise a request would wait for the load, and a kernel that needs too many resources would fail only then.

    Raises: UnsupportedTargetError: one needs more shared memory or threads than the GPU has.
    """
    for kernel in kernels:
        if kernel is None:  # of the interpreter
            continue
        try:
            _ = kernel.run
        except OutOfResources as error:
            what = "bytes of shared memory" if error.name == "shared memory" else error.name
            raise UnsupportedTargetError(
                f"kernel {kernel.name} needs {error.required} {what}, the GPU has {error.limit}. {_INSTEAD}"
            ) from error


def load_driver() -> None:
    """Loads Triton's part that calls the GPU's driver: Triton compiles it at its first use.

    Raises: UnsupportedTargetError: there is no C compiler, or it fails.
    """
    try:
        driver.active.get_current_device()
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedTargetError(
            f"Triton cannot call the GPU: {_reason(error)}. Install a C compiler such as gcc, with the headers of "
            f"Python and the C library. {_INSTEAD}"
        ) from error


def _reason(error: Exception) -> str:
    """Returns the line of one of Triton's errors that says what is wrong, without the source that it quotes."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if re.search("error|fatal", line, re.IGNORECASE)), lines[-1]).strip(". ")


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
